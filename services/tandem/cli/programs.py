"""Implement `tandem gateway` and `tandem worker`: check the settings and run one program in this process."""

from __future__ import annotations

import argparse
from importlib import import_module

from tandem.cli.auth_check import require_auth_if_public
from tandem.cli.free_port import require_free_port
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.obs.logs.logging_setup import set_up_logging


def run_gateway(resolved: Resolved, _args: argparse.Namespace) -> int:
    require_free_port(resolved.config.gateway)
    if not resolved.config.redis.url:
        message = "a gateway finds its workers in Redis: say where with --redis-url"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    require_auth_if_public(resolved)
    return int(import_module("tandem.gateway.main").run(resolved.config))


def run_worker(resolved: Resolved, _args: argparse.Namespace) -> int:
    import_module("tandem.worker.bind_check").require_worker_auth(resolved.config)  # before a model is loaded
    set_up_logging(resolved.config.telemetry, "tandem-worker", resolved.config.worker.id)
    return int(import_module("tandem.worker.main").run(resolved.config))
