"""Run a cluster on five hosts of this machine until the end of standard input, and change their links by commands.

    python -m tests.hosts [--model NAME] [FLAG ...]

Commands, one per line: `link [delay_s=0.05] [loss=0.01] [bytes_per_s=12.5e6]` for the link of host b, `cut A B` and
`heal A B` for what host A sends to host B, `unplug A` and `plug A`. Further flags go to all programs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.cluster import Hosts, running_hosts
from tests.hosts.network import NoNamespaces


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description="A cluster on hosts of this machine.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix="tandem-hosts-") as directory:
        try:
            with running_hosts(Path(directory), args.model, "--transfer-backend", "tcp", *flags) as hosts:
                _write(f"{hosts.gateway.url} splits requests, {hosts.whole.url} splits none")
                _write(f"tandem role {' '.join(hosts.flags)}")
                for name, network in hosts.network.items():
                    _write(f"{name}: {network.address}, {' '.join(network.within)} COMMAND")
                for line in sys.stdin:
                    _carry_out(hosts, line.split())
        except NoNamespaces as reason:
            _write(f"no network namespaces here: {reason}")
            return 1
    return 0


def _carry_out(hosts: Hosts, words: Sequence[str]) -> None:
    network = hosts.network
    try:
        match words:
            case ["link", *settings]:
                network["b"].impair(**{name: float(value) for name, value in (word.split("=") for word in settings)})
            case ["cut", one, other]:
                network[one].blackhole_route_to(network[other])
            case ["heal", one, other]:
                network[one].restore_route_to(network[other])
            case ["unplug", one]:
                network[one].unplug()
            case ["plug", one]:
                network[one].plug_in()
            case []:
                return
            case _:
                _write("commands: link, cut, heal, unplug, plug")
    except (KeyError, TypeError, ValueError, NoNamespaces) as error:
        _write(f"{type(error).__name__}: {error}")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
