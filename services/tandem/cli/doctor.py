"""Implement `tandem doctor`: check this machine and a cluster without changing them, and print remedies."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from tandem.cli.cluster_members import members_of
from tandem.core.clock import SystemClock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.doctor.checks import Dependencies, Options, list_checks
from tandem.doctor.report import document, exit_code, table
from tandem.doctor.runner import Check, Examined, run_checks
from tandem.doctor.system import System
from tandem.doctor.versions import installed_parts
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.worker.addresses import advertised_address, default_route_address, require_worker_auth


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Run the checks and print their findings; returns the exit code 1 if a check failed, else 0.

    With `--strict` a warning gives 1 as well. Raises TandemError(INVALID_REQUEST) for an unknown check in `--only`."""
    set_up_logging(resolved.config.telemetry, "tandem-doctor")
    clock = SystemClock()
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    is_paired = args.pairs or "pairs" in only
    options = Options(args.url, args.ca_file, "all" if args.all_pairs else "few" if is_paired else "none")
    dependencies = Dependencies(
        members_of,
        # Imported on use: a worker's image lacks the gateway's packages.
        lambda settings: import_module("tandem.cli.gateway_checks").require_auth_if_public(settings),
        lambda settings: require_worker_auth(settings.config),
        lambda worker, environ: advertised_address(worker, worker.port, environ, default_route_address),
    )
    checks = list_checks(resolved, System(), dependencies, options, installed_parts(), clock)
    selected = _selected(checks, only)
    examined = asyncio.run(run_checks([check for check in checks if check.name in selected], clock))
    print(_report(examined, args))  # noqa: T201 - the command's output
    return exit_code(examined, is_strict=args.strict)


def _selected(checks: Sequence[Check], names: Sequence[str]) -> set[str]:
    """Return the names of the checks that report the findings of these names; the names of all checks if there are
    none."""
    known = {name: check.name for check in checks for name in (check.name, *check.others)}
    for name in names:
        if name not in known:
            message = f"--only {name}: there is no such check; known are {', '.join(known)}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="only")
    return {known[name] for name in names or known}


def _report(examined: Sequence[Examined], args: argparse.Namespace) -> str:
    if args.json:
        return json.dumps(document(examined, is_strict=args.strict), indent=2)
    return table(examined, has_colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
