"""Divide the GPUs and the cores of this machine among the workers that run on it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tandem.core.errors import ErrorKind, TandemError

_PARTS = 10_000
"""Ray's resolution of fractional GPUs: 1 / 10,000."""


def gpu_share(num_workers: int, num_gpus: int, utilization: float, num_ranks: int = 1) -> tuple[float, float]:
    """Return the GPU share of each rank, equal for all ranks of all workers on this machine: the GPUs that Ray reserves
    for it, 1 or a fraction, and the fraction of that GPU's memory that it may use.

    `num_gpus`: GPUs of the machine. `utilization`: fraction of a GPU's memory that may be used, divided evenly between
    ranks that run on one GPU. `num_ranks`: ranks of each worker. Raises TandemError(UNSUPPORTED) if there is no GPU, or
    if workers of several ranks cannot have one GPU for each rank."""
    if num_gpus < 1:
        message = "model.device=cuda, but Ray finds no GPU on this machine: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="device")
    num_together = -(-num_workers * num_ranks // num_gpus)
    if num_ranks > 1 < num_together:
        message = (
            f"{num_workers} workers with engine.tensor_parallel={num_ranks} need {num_workers * num_ranks} GPUs, and "
            f"this machine has {num_gpus}: start fewer workers, or lower --tensor-parallel"
        )
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="tensor_parallel")
    return _PARTS // num_together / _PARTS, utilization / num_together


def threads_by_pool(pools: Mapping[str, int], num_threads: int = 0) -> dict[str, int]:
    """Return the number of compute threads of each worker, by pool.

    `pools`: number of workers of each pool. `num_threads`: the result for all pools if it is not 0. A decode or mixed
    worker gets the number of cores divided by the number of all workers, so that these workers do not wait for each
    other. A prefill worker gets the number of cores divided by the number of prefill workers, so some cores are
    assigned twice: a decode worker leaves its cores idle most of the time, and while it computes, a prefill step
    continues on the other cores, because its threads fetch work dynamically."""
    num_cores, num_workers = len(os.sched_getaffinity(0)), sum(pools.values())
    shares = {pool: size if pool == "prefill" else num_workers for pool, size in pools.items()}
    return {pool: num_threads or max(1, num_cores // share) for pool, share in shares.items()}
