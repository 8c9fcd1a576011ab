"""Run the `tandem` command as `python -m tandem.cli`, where its script is not installed."""

import sys

from tandem.cli.main import main

sys.exit(main())
