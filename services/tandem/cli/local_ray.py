"""Run Ray on this machine with one Serve application for each worker pool."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's own default, set explicitly because Ray otherwise logs a warning about it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Without "clusters" Ray takes 127.0.0.1 as the address of this machine, and its programs listen on loopback only.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray import serve

from tandem.cli.private_directory import private_directory, secret_file
from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.listener_probe import refuses_connections
from tandem.worker.serve.deployment import STOP_MARGIN_S, pool_application
from tandem.worker.serve.pool_spec import PoolSpec, full_layer

OBJECT_STORE_BYTES = 100 << 20
"""Close to Ray's minimum, because no tensors go through the object store."""
GCS_PROBE_S = 1.0
"""Longest wait for a connection to Ray's global control service before a drain."""


class LocalRay:
    """Running local Ray cluster, on which worker pools can be deployed and drained; `local_ray` creates it.

    `logs`: directory with one log file for each worker. `num_gpus`: number of GPUs that Ray found. `gcs_address`:
    host:port of Ray's global control service."""

    def __init__(self, logs: Path, num_gpus: int, gcs_address: str) -> None:
        self.logs = logs
        self.num_gpus = num_gpus
        self._gcs_address = gcs_address
        self._apps: list[str] = []
        self._stop_s = 0.0

    def deploy(self, configs: Mapping[str, Config], pools: Mapping[str, int], num_gpus: float = 0.0) -> None:
        """Start the workers of all pools and wait until every worker is healthy.

        `configs`: settings of the workers, by pool. `pools`: number of workers, by pool. `num_gpus`: GPUs that Ray
        reserves for each worker, may be a fraction. Raises TandemError(INTERNAL) with the reasons if a worker cannot
        start."""
        targets = [local_target(configs[pool], pool, size, num_gpus) for pool, size in pools.items()]
        self._apps = [target.name for target in targets]
        self._stop_s = STOP_MARGIN_S + max(configs[pool].worker.drain_s for pool in pools)
        try:
            serve.run_many(targets)
        except RuntimeError as error:
            message = f"the workers did not start: {_reasons() or error}\nlogs: {self.logs}"
            raise TandemError(ErrorKind.INTERNAL, message) from error

    def drain(self) -> None:
        """Delete the deployed applications one by one, which drains their workers, and wait for each, also for longer
        than the minute after which `serve.delete` gives up: a worker may drain for `worker.drain_s` seconds.

        Returns early if Ray's control service refuses connections, as after a signal to all processes, because
        `serve.delete` would wait a minute for the service. `serve.shutdown` is not used because it logs the end of
        Serve's controller as a failure."""
        for app in self._apps:
            if not self._delete(app):
                return

    def _delete(self, app: str) -> bool:
        """Delete an application and return True; return False if Ray's control service refuses connections. Raises
        TimeoutError if the application still exists when its workers must have ended."""
        until = SystemClock.now() + self._stop_s
        while not asyncio.run(refuses_connections(self._gcs_address, GCS_PROBE_S)):
            try:
                serve.delete(app)
                return True
            except TimeoutError:
                if SystemClock.now() >= until:
                    raise
        return False


def local_target(config: Config, role: str, num_replicas: int, num_gpus: float = 0.0) -> serve.RunTarget:
    """Return the Ray Serve target that runs `num_replicas` workers of pool `role` with the settings `config`.

    `num_gpus`: GPUs of each worker, may be a fraction. Each worker chooses its own id and port."""
    own = replace(config, worker=replace(config.worker, pool=role, id="", port=0))  # type: ignore[arg-type]
    pool = PoolSpec(name=role, above=(full_layer(own, "tandem serve"),), num_gpus=num_gpus)
    return serve.RunTarget(target=pool_application(pool, own, num_replicas), name=pool.deployment, route_prefix=None)


def use_private_files() -> Path:
    """Return a directory for Ray's files that only this user can read, and make Ray store its authentication token in
    it.

    The token is stored elsewhere if an environment variable gives the token or its path. By default Ray would make its
    session files, and the token in the home directory, readable for everybody. Raises TandemError(INVALID_REQUEST) if
    the directory cannot be made."""
    files = private_directory(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(secret_file(files / "ray_token"))
    return files


def _reasons() -> str:
    """Return why deployments failed: the last line of each failed deployment's message, which ends with a traceback."""
    apps = serve.status().applications.values()
    messages = [deployment.message for app in apps for deployment in app.deployments.values()]
    last_lines = [message.strip().splitlines()[-1] for message in messages if "Traceback" in message]
    return "; ".join(dict.fromkeys(line.removeprefix("tandem.core.errors.TandemError: ") for line in last_lines))


@contextmanager
def local_ray(num_ranks: int) -> Iterator[LocalRay]:
    """Return a context manager that starts Ray and Serve on this machine, and stops both at the end.

    `num_ranks`: number of ranks of all workers together. The workers are drained before the stop, unless the block is
    left by an exception. Raises TandemError(INVALID_REQUEST) if no directory can be made that other users cannot enter.
    """
    files = use_private_files()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        # One CPU for each rank (a scheduling slot, not a core), and one for Serve's own actors.
        context = ray.init(
            address="local",
            num_cpus=num_ranks + 1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="WARNING",
            _temp_dir=str(files / "ray"),
        )
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        info = context.address_info
        local = LocalRay(Path(info["session_dir"]) / "logs" / "serve", num_gpus, info["gcs_address"])
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        yield local
        local.drain()
    finally:
        ray.shutdown()
