"""Define the flags of `tandem role` and `tandem drain`, without importing what the commands need."""

from __future__ import annotations

import argparse
from typing import get_args

from tandem.routing.worker_view import Pool


def add_role_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="id of the worker; without one all workers are listed")
    command.add_argument("role", nargs="?", choices=get_args(Pool), help="role by which routers use it from now on")


def add_drain_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="id of the worker")
    command.add_argument("--local", action="store_true", help="drain every worker on this machine, found in --run-dir")
    command.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait for its jobs (default: --worker-drain-s)"
    )
