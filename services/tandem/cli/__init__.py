"""Floor 6, the `tandem` command: reads settings, runs one program; never serves a request itself."""

from tandem.cli.main import main

__all__ = ["main"]
