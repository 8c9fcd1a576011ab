"""`python -m tests.e2e.serve.redeploy`: deploys pools of a running `tandem serve` anew, one after the other, as a new
version of an application is rolled out; never starts or ends a Ray.

Arguments: the address of Ray, then as `tandem role` takes them the Redis, its namespace and the secret, then pools.
"""

from __future__ import annotations

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # as `tandem serve`, whose Ray is at 127.0.0.1

import ray
from ray import serve

from tandem.cli.local_ray import local_target, use_private_files
from tandem.core.config import ClusterConfig, Config, EngineConfig, RedisConfig


def main(address: str, redis_url: str, namespace: str, secret_file: str, *pools: str) -> None:
    """Returns when the replicas of all pools are new and healthy."""
    config = Config(
        engine=EngineConfig(num_threads=1),
        redis=RedisConfig(url=redis_url, namespace=namespace),
        cluster=ClusterConfig(secret_file=secret_file),
    )
    use_private_files()  # the token of `tandem serve` is there
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    try:
        for pool in pools:
            serve.run_many([local_target(config, pool, 1)])
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
