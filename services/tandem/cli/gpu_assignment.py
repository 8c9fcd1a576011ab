"""Divide the GPUs of this machine among the workers that run on it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError

_PARTS = 10_000
"""Ray's resolution of fractional GPUs: 1 / 10,000."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """GPU resources of one rank of a worker.

    `num_gpus`: GPUs that Ray reserves for the rank, 1 or a fraction. `memory_utilization`: fraction of that GPU's
    memory that the rank may use.
    """

    num_gpus: float
    memory_utilization: float


def gpu_share(num_workers: int, num_gpus: int, utilization: float, num_ranks: int = 1) -> GpuShare:
    """Return the share of each rank, equal for all ranks of all workers.

    Ranks that must run on one GPU divide `utilization` (the fraction of its memory that may be used) evenly. Raises
    TandemError(UNSUPPORTED) if there is no GPU, or if workers of several ranks cannot have one GPU for each rank.
    """
    if num_gpus < 1:
        message = "device 'cuda': Ray finds no GPU on this machine (is one visible in CUDA_VISIBLE_DEVICES?)"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="device")
    num_together = -(-num_workers * num_ranks // num_gpus)
    if num_ranks > 1 < num_together:
        message = f"{num_workers} workers of {num_ranks} ranks need a GPU for each rank, this machine has {num_gpus}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="tensor_parallel")
    return GpuShare(_PARTS // num_together / _PARTS, utilization / num_together)
