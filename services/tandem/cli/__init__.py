"""Parse the command line of `tandem`, resolve the settings and run one program or subcommand (import layer 6).

`main.main` is the entry point; `subcommands` lists each subcommand with the function that runs it, read that first.
`serve` starts everything on one machine, `programs` a gateway, worker or planner. The other modules implement one
subcommand each, or parts that several of them share.
"""

from tandem.cli.main import main

__all__ = ["main"]
