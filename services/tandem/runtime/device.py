"""Choose torch's dtype, number of threads and device from settings."""

from __future__ import annotations

import os

import torch

from tandem.core.errors import ErrorKind, TandemError

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with the name `name`: float64, float32, bfloat16 or float16.

    Raises TandemError(UNSUPPORTED) for any other name."""
    if name not in _DTYPES:
        raise TandemError(
            ErrorKind.UNSUPPORTED, f"model.dtype={name!r} must be one of {', '.join(_DTYPES)}", param="dtype"
        )
    return _DTYPES[name]


def num_compute_threads(requested: int) -> int:
    """Return the number of CPU threads for a step: `requested`, or if that is 0 all cores that this process may use."""
    return requested or len(os.sched_getaffinity(0))


def rank_device(device: str, rank: int) -> torch.device:
    """Return the torch device of a rank: the CPU, or the visible GPU with the number `rank`.

    `device`: "cpu" or "cuda". `rank`: the rank's number among the ranks on this machine. If fewer GPUs are visible, for
    example because each rank's process sees only its own, the last visible GPU is returned."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, max(0, min(rank, torch.cuda.device_count() - 1)))
