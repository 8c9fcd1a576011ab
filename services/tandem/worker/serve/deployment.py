"""Run a worker as a Ray Serve deployment: placement, health checks, restart and drain. Requests do not pass through
Serve.

Ray Serve owns the life of each replica. The worker itself, `worker.worker.Worker`, does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve

from tandem.core.config import Config, TelemetryConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.worker.addresses import advertised_address
from tandem.worker.main import prepare_process, settle_process
from tandem.worker.ranks.ray_rank import SLOT, launch_actors, node_address, slot
from tandem.worker.serve.pool_spec import PoolSpec

if TYPE_CHECKING:
    from tandem.worker.worker import Worker

_log = logging.getLogger(__name__)

STOP_MARGIN_S = 10.0
"""Seconds beyond `drain_s` that Serve waits before it kills a replica."""
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
SURGE_PERCENT = 20
"""Extra workers of a pool, in percent, while its workers are replaced. Serve rounds up, so that a pool of one has its
next worker before it loses the last."""


class WorkerReplica:
    """Run one worker in a Serve replica, from the replica's start to its end. `check_health` raises RuntimeError when
    the worker's step loop or transport is broken, so that Serve replaces the replica."""

    async def __init__(self, pool: PoolSpec) -> None:  # type: ignore[misc]
        self._worker: Worker | None = None
        prepare_process()
        config = _replica_config(pool.resolve(os.environ).config)
        _log_with_serve(config.telemetry, config.worker.id)
        _log.info("importing torch")
        # Imported after prepare_process, because the model's libraries read the environment on import.
        from tandem.worker.model.worker_model import load_worker_model
        from tandem.worker.worker import start_worker

        self._drain_s = config.worker.drain_s
        launch = launch_actors(config) if config.engine.tensor_parallel > 1 else None
        self._worker = await start_worker(config, await asyncio.to_thread(load_worker_model, config, launch))
        settle_process()

    async def check_health(self) -> None:
        problem = "the worker has not started" if self._worker is None else self._worker.healthy()
        if problem is not None:
            raise RuntimeError(problem)

    async def __call__(self, _request: Any) -> dict[str, str]:
        """Return the worker's id and state as a dictionary. This is the route of the application: KubeRay considers the
        pods of an application ready only if the application has a route that answers Serve's proxies."""
        assert self._worker is not None
        return {"worker": str(self._worker.me.id), "state": self._worker.healthy() or "healthy"}

    async def __del__(self) -> None:
        """Drain and stop the worker. Serve awaits this call when it stops a replica in order, for at most `drain_s` and
        a margin."""
        if self._worker is not None:
            await self._worker.drain(self._drain_s)
            await self._worker.stop()


def _replica_config(config: Config) -> Config:
    """Return `config` with the settings of this replica: a unique worker name, its address in Ray's network, and any
    free port for the ranks on other machines, which get the port from the replica. Raises TandemError where redis.url
    is empty or this machine has no address."""
    if not config.redis.url:
        message = "redis.url is empty: gateways find workers in Redis (TANDEM_REDIS__URL in the environment of the pod)"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    unique = serve.get_replica_context().replica_id.unique_id
    name = f"{config.worker.id or socket.gethostname()}-{unique}"
    worker = replace(config.worker, id=name, advertise_address=_advertise_address(config.worker))
    return replace(config, worker=worker, engine=replace(config.engine, master_port=0))


def _advertise_address(worker: WorkerConfig) -> str:
    return advertised_address(worker, worker.port, os.environ, node_address)


def _log_with_serve(telemetry: TelemetryConfig, worker: str) -> None:
    """Log to Serve's own log file of this replica, whose name contains the pool. The memory buffer in front of Serve's
    file is bypassed, so that the last lines before a crash are in the file."""
    serves = logging.getLogger("ray.serve").handlers
    ours = [getattr(handler, "target", None) or handler for handler in serves]
    set_up_logging(telemetry, "tandem-worker", worker, handlers=ours)


def _placement_options(config: Config, pool: PoolSpec, num_gpus: float) -> dict[str, Any]:
    """Return the Ray options that place a replica: resources for one rank, or a placement group with a bundle for each
    of the worker's engine.nnodes machines. A bundle holds the ranks of one machine and the pool's resources."""
    own = {"num_cpus": SLOT["CPU"], "num_gpus": num_gpus, "resources": dict(pool.resources)}
    engine = config.engine
    if engine.tensor_parallel == 1:
        return {"ray_actor_options": own}
    ranks = {name: amount * engine.ranks_per_node for name, amount in slot(config).items()}
    bundles = [ranks | dict(pool.resources)] * engine.nnodes
    return {"ray_actor_options": own, "placement_group_bundles": bundles, "placement_group_strategy": "PACK"}


def pool_application(pool: PoolSpec, config: Config, num_replicas: int = 1) -> Any:
    """Return the Serve application that runs `num_replicas` workers of a pool.

    `config` has the pool's settings as resolved on this machine; only values that do not depend on the worker's machine
    are used. Raises TandemError when the number of GPUs does not fit the settings.
    """
    deployment = serve.deployment(WorkerReplica).options(
        name=pool.deployment,
        num_replicas=num_replicas,
        **_placement_options(config, pool, pool.gpus_per_rank(config)),
        max_ongoing_requests=1,
        max_surge_percent=SURGE_PERCENT,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.worker.drain_s + STOP_MARGIN_S,
    )
    return deployment.bind(pool)
