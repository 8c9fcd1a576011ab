"""Implement `tandem gateway`, `tandem worker` and `tandem planner`: check the settings and run one program here."""

from __future__ import annotations

import argparse
from importlib import import_module

from tandem.cli.gateway_checks import gateway_ports, require_auth_if_public, require_tls_files
from tandem.cli.ports import PortSetting, require_free_ports
from tandem.core.config import WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.obs.logs.logging_setup import set_up_logging


def run_gateway(resolved: Resolved, _args: argparse.Namespace) -> int:
    require_free_ports(gateway_ports(resolved.config.gateway))
    if not resolved.config.redis.url:
        message = "redis.url is empty: a gateway finds its workers in Redis, so set --redis-url"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    require_auth_if_public(resolved)
    require_tls_files(resolved.config.gateway)
    return int(import_module("tandem.gateway.main").run(resolved.config))


def run_worker(resolved: Resolved, _args: argparse.Namespace) -> int:
    # Both checks run before the model is loaded, because loading takes minutes and a mistake is found in a moment.
    import_module("tandem.worker.addresses").require_worker_auth(resolved.config)
    if resolved.config.engine.node_rank == 0:  # the other ranks listen on neither port
        require_free_ports(_worker_ports(resolved.config.worker))
    set_up_logging(resolved.config.telemetry, "tandem-worker", resolved.config.worker.id)
    return int(import_module("tandem.worker.main").run(resolved.config))


def _worker_ports(config: WorkerConfig) -> list[PortSetting]:
    return [
        PortSetting("worker.port", "--worker-port", "worker.host", config.host, config.port),
        PortSetting("worker.metrics_port", "--metrics-port", "worker.host", config.host, config.metrics_port),
    ]


def run_planner(resolved: Resolved, args: argparse.Namespace) -> int:
    """Run the planner and return its exit code: 0, or 1 if the single decision of `--once` failed.

    Raises TandemError for settings that are missing or contradict each other."""
    config = resolved.config
    if not config.redis.url:
        message = "redis.url is empty: a planner finds gateways and workers in Redis, so set --redis-url"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    if config.planner.actuator == "raycluster":
        _require_cluster(resolved)
    return int(import_module("tandem.planner.main").run(config, is_single=args.once, as_json=args.json))


def _require_cluster(resolved: Resolved) -> None:
    planner = resolved.config.planner
    if bool(planner.rayservice) == bool(planner.raycluster):
        message = "planner.actuator=raycluster needs a cluster: set --rayservice, or --raycluster without a RayService"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="planner.rayservice")
    if not planner.groups:
        message = (
            "planner.actuator=raycluster needs the worker group of each role: set --groups prefill=GROUP,decode=GROUP"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="planner.groups")
