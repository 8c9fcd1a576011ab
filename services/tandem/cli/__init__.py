"""Floor 6: the `tandem` command, which reads the settings and runs one program."""

from tandem.cli.main import main

__all__ = ["main"]
