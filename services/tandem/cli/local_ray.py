"""A Ray on this machine with one Serve application per worker pool; never sees a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve

from tandem.core.config import Config
from tandem.worker.deployment import pool_application

OBJECT_STORE_BYTES = 100 << 20
"""Ray's smallest sensible one: no tensor ever goes through it."""


@contextmanager
def local_ray(num_workers: int) -> Iterator[None]:
    """Start Ray and Serve without their dashboard and proxies; end both on the way out."""
    # One CPU per worker, which is a slot and not a core; the other one is for Serve's own actors.
    ray.init(
        num_cpus=num_workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="WARNING",
    )
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(config: Config, pools: dict[str, int]) -> None:
    """Run all pools; returns when every worker is healthy. Raises RuntimeError when one cannot start."""
    serve.run_many(
        [
            serve.RunTarget(target=pool_application(config, pool, size), name=f"tandem-{pool}", route_prefix=None)
            for pool, size in pools.items()
        ]
    )
