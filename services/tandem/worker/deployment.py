"""A worker as a Ray Serve deployment: placement, health, restart and drain; never a request, which comes by gRPC.

Ray Serve owns a worker's life. Everything else is `worker.program.Worker`, which knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve

from tandem.core.config import Config, TelemetryConfig
from tandem.obs.logs import set_up_logging
from tandem.worker.main import prepare_process, settle_process
from tandem.worker.rank_actor import launch_actors, slot

if TYPE_CHECKING:
    from tandem.worker.life import Worker

STOP_MARGIN_S = 10.0
"""How much longer than `drain_s` Serve waits before it kills a replica."""
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0


class WorkerReplica:
    """One worker per replica. Raises from `check_health` when the worker's step loop or transport is broken, so that
    Serve replaces it."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        self._worker: Worker | None = None
        prepare_process()
        _log_with_serve(config.telemetry)
        # Only now: importing the model's libraries reads the environment.
        from tandem.worker.model import load_worker_model
        from tandem.worker.program import start_worker

        self._drain_s = config.worker.drain_s
        launch = launch_actors(config) if config.engine.tensor_parallel > 1 else None
        self._worker = await start_worker(config, await asyncio.to_thread(load_worker_model, config, launch))
        settle_process()

    async def check_health(self) -> None:
        problem = "it has not started" if self._worker is None else self._worker.healthy()
        if problem is not None:
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        """Serve awaits this when it stops a replica in order, for at most `drain_s` and a margin."""
        if self._worker is not None:
            await self._worker.drain(self._drain_s)
            await self._worker.stop()


def _log_with_serve(telemetry: TelemetryConfig) -> None:
    """Into Serve's own file of this replica, whose name says which pool it is of; past the buffer in front of it,
    because the last lines before a crash are the ones that matter."""
    serves = logging.getLogger("ray.serve").handlers
    ours = [getattr(handler, "target", None) or handler for handler in serves]
    set_up_logging(telemetry, "tandem-worker", handlers=ours)


def _ranks(config: Config) -> dict[str, Any]:
    """A place for each rank of a replica, the first one's own among them, all on one machine."""
    size = config.engine.tensor_parallel
    if size == 1:
        return {}
    return {"placement_group_bundles": [slot(config)] * size, "placement_group_strategy": "STRICT_PACK"}


def pool_application(config: Config, pool: str, num_replicas: int, num_gpus: float = 0.0) -> Any:
    """The Serve application of one pool: `num_replicas` workers labelled `pool`, with `num_gpus` for each rank of each,
    of which a part means a part of one GPU."""
    worker = replace(config.worker, pool=pool, id="", port=0)  # type: ignore[arg-type]
    deployment = serve.deployment(WorkerReplica).options(
        name=f"tandem-{pool}",
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": num_gpus},
        **_ranks(config),
        max_ongoing_requests=1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.worker.drain_s + STOP_MARGIN_S,
    )
    return deployment.bind(replace(config, worker=worker))
