"""Implement `tandem planner`: check its settings and run the autoscaler of a cluster."""

from __future__ import annotations

import argparse
from importlib import import_module

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved


def add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--once", action="store_true", help="make one decision, print its reasons, and exit")
    command.add_argument("--json", action="store_true", help="write each decision as a line of JSON")


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Run the planner; returns 0, or 1 if the single decision of `--once` failed. Raises TandemError for settings."""
    config = resolved.config
    if not config.redis.url:
        message = "a planner finds gateways and workers in Redis: say where with --redis-url"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    if config.planner.actuator == "raycluster":
        _require_cluster(resolved)
    return int(import_module("tandem.planner.main").run(config, is_single=args.once, as_json=args.json))


def _require_cluster(resolved: Resolved) -> None:
    planner = resolved.config.planner
    if bool(planner.rayservice) == bool(planner.raycluster):
        message = "say which with --planner-rayservice, or with --planner-raycluster where no RayService owns it"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="planner.rayservice")
    if not planner.groups:
        message = "say which worker groups have which role: --planner-groups prefill=GROUP,decode=GROUP"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="planner.groups")
