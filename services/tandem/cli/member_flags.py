"""The arguments of what asks or tells single workers; never asks one."""

from __future__ import annotations

import argparse
from typing import get_args

from tandem.routing.worker_view import Pool


def add_role_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="its id; without one all workers are listed")
    command.add_argument("role", nargs="?", choices=get_args(Pool), help="what routers take it for from now on")


def add_drain_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("worker", nargs="?", help="its id")
    command.add_argument("--local", action="store_true", help="every worker that runs here, found in --run-dir")
    command.add_argument(
        "--timeout", type=float, metavar="S", help="seconds that what it has may take (default: --worker-drain-s)"
    )
