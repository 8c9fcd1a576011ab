"""Divides the GPUs of this machine among the workers that run on it; never looks for one and never starts a worker."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError

_PARTS = 10_000
"""Ray counts GPUs in parts of so many."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Of one rank of a worker: what Ray reserves for it, in GPUs, and how much of that GPU's memory it may take."""

    num_gpus: float
    memory_utilization: float


def gpu_share(num_workers: int, num_gpus: int, utilization: float, num_ranks: int = 1) -> GpuShare:
    """Every rank of every worker gets the same: `utilization` of a GPU's memory is shared by those that have to be on
    one. Raises TandemError where there is no GPU, or not one for each of several ranks."""
    if num_gpus < 1:
        message = "device 'cuda': Ray finds no GPU on this machine (is one visible in CUDA_VISIBLE_DEVICES?)"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="device")
    num_together = -(-num_workers * num_ranks // num_gpus)
    if num_ranks > 1 < num_together:
        message = f"{num_workers} workers of {num_ranks} ranks need a GPU for each rank, this machine has {num_gpus}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="tensor_parallel")
    return GpuShare(_PARTS // num_together / _PARTS, utilization / num_together)
