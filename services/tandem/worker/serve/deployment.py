"""A worker as a Ray Serve deployment: placement, health, restart and drain; never a request, which comes by gRPC.

Ray Serve owns a worker's life. Everything else is `worker.program.Worker`, which knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from tandem.core.config import Config, TelemetryConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.worker.advertise_address import advertised_address
from tandem.worker.main import prepare_process, settle_process
from tandem.worker.ranks.ray_rank import SLOT, launch_actors, slot
from tandem.worker.serve.pool_spec import PoolSpec

if TYPE_CHECKING:
    from tandem.worker.worker import Worker

STOP_MARGIN_S = 10.0
"""How much longer than `drain_s` Serve waits before it kills a replica."""
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
SURGE_PERCENT = 20
"""Of a pool's workers there may be more while they are replaced; Serve rounds up, so that a pool of one has its next
worker before it loses the last."""


class WorkerReplica:
    """One worker per replica. Raises from `check_health` when the worker's step loop or transport is broken, so that
    Serve replaces it."""

    async def __init__(self, pool: PoolSpec) -> None:  # type: ignore[misc]
        self._worker: Worker | None = None
        prepare_process()
        config = _here(pool.resolve(os.environ).config)
        _log_with_serve(config.telemetry, config.worker.id)
        # Only now: importing the model's libraries reads the environment.
        from tandem.worker.factory import start_worker
        from tandem.worker.model.worker_model import load_worker_model

        self._drain_s = config.worker.drain_s
        launch = launch_actors(config) if config.engine.tensor_parallel > 1 else None
        self._worker = await start_worker(config, await asyncio.to_thread(load_worker_model, config, launch))
        settle_process()

    async def check_health(self) -> None:
        problem = "it has not started" if self._worker is None else self._worker.healthy()
        if problem is not None:
            raise RuntimeError(problem)

    async def __call__(self, _request: Any) -> dict[str, str]:
        """What Serve's proxies answer at the route that an application must have for KubeRay to find its pods ready."""
        assert self._worker is not None
        return {"worker": str(self._worker.me.id), "state": self._worker.healthy() or "healthy"}

    async def __del__(self) -> None:
        """Serve awaits this when it stops a replica in order, for at most `drain_s` and a margin."""
        if self._worker is not None:
            await self._worker.drain(self._drain_s)
            await self._worker.stop()


def _here(config: Config) -> Config:
    """With what only a replica knows: a name that no other has, its address in Ray's network. Raises TandemError."""
    if not config.redis.url:
        message = "redis.url is empty: gateways find workers in Redis (TANDEM_REDIS__URL in the environment of the pod)"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    unique = serve.get_replica_context().replica_id.unique_id
    name = f"{config.worker.id or socket.gethostname()}-{unique}"
    return replace(config, worker=replace(config.worker, id=name, advertise_address=_advertise_address(config.worker)))


def _advertise_address(worker: WorkerConfig) -> str:
    return advertised_address(worker, worker.port, os.environ, lambda _: str(ray.util.get_node_ip_address()))


def _log_with_serve(telemetry: TelemetryConfig, worker: str) -> None:
    """Into Serve's own file of this replica, whose name says which pool it is of; past the buffer in front of it,
    because the last lines before a crash are the ones that matter."""
    serves = logging.getLogger("ray.serve").handlers
    ours = [getattr(handler, "target", None) or handler for handler in serves]
    set_up_logging(telemetry, "tandem-worker", worker, handlers=ours)


def _places(config: Config, pool: PoolSpec, num_gpus: float) -> dict[str, Any]:
    """What Ray sets aside: for a replica of several ranks a place for each, the first one's own among them, all on one
    machine."""
    own = {"num_cpus": SLOT["CPU"], "num_gpus": num_gpus, "resources": dict(pool.resources)}
    if config.engine.tensor_parallel == 1:
        return {"ray_actor_options": own}
    rest = [slot(config)] * (config.engine.tensor_parallel - 1)
    bundles = [slot(config) | dict(pool.resources), *rest]
    return {
        "ray_actor_options": own,
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
    }


def pool_application(pool: PoolSpec, config: Config, num_replicas: int = 1) -> Any:
    """The Serve application of `num_replicas` workers of a pool. `config`, its settings as they are here, says what
    does not depend on where a worker runs. Raises TandemError for GPUs that do not fit it."""
    deployment = serve.deployment(WorkerReplica).options(
        name=pool.deployment,
        num_replicas=num_replicas,
        **_places(config, pool, pool.gpus_per_rank(config)),
        max_ongoing_requests=1,
        max_surge_percent=SURGE_PERCENT,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.worker.drain_s + STOP_MARGIN_S,
    )
    return deployment.bind(pool)
