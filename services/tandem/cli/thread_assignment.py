"""Divide the cores of this machine among the workers that run on it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def threads_by_pool(pools: Mapping[str, int], num_threads: int = 0) -> dict[str, int]:
    """Return the number of compute threads of each worker, by pool.

    `pools` holds the number of workers of each pool. `num_threads` is the result for all pools if it is not 0.

    Decode and mixed workers divide the cores, so that their steps don't wait for each other. Prefill workers divide
    all cores once more among themselves: a decode worker leaves its core idle most of the time, and while it computes,
    a prefill step continues on the other cores, because its threads fetch work dynamically.
    """
    num_cores, num_workers = len(os.sched_getaffinity(0)), sum(pools.values())
    shares = {pool: size if pool == "prefill" else num_workers for pool, size in pools.items()}
    return {pool: num_threads or max(1, num_cores // share) for pool, share in shares.items()}
