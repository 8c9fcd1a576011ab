"""List the peers, and install them: `python -m loadtest peers`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from loadtest.peers.catalog import PEERS, home, is_installed
from loadtest.peers.install import install


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest peers", description="Install systems to compare with.")
    parser.add_argument("action", choices=("list", "install"), nargs="?", default="list")
    parser.add_argument("names", nargs="*", choices=[*PEERS, []], metavar="NAME", help=f"of {', '.join(PEERS)}")
    args = parser.parse_args(argv)
    if args.action == "list":
        for name in PEERS:
            sys.stdout.write(f"{name:<14} {home(name) if is_installed(name) else 'not installed'}\n")
        return 0
    for name in args.names:
        sys.stderr.write(f"installing {name} below {home(name)} ...\n")
        try:
            install(name)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"loadtest peers: {name} could not be installed: {error}\n")
            return 1
    return 0
