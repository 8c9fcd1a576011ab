"""`tandem planner`: has a cluster grow and shrink with what it is asked for; composes nothing itself."""

from __future__ import annotations

import argparse
from importlib import import_module

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved


def add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--once", action="store_true", help="make one decision, say why, and end")
    command.add_argument("--json", action="store_true", help="write each decision as a line of JSON")


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Returns 0; 1 where a single decision failed. Raises TandemError."""
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
