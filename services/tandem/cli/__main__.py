"""`python -m tandem.cli`: the `tandem` command where no script is installed; nothing else."""

import sys

from tandem.cli.main import main

sys.exit(main())
