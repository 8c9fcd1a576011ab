"""Which numbers and how many threads torch computes with; never touches a model."""

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
    """The torch type of a name of `tandem.kv.layout.ITEM_BYTES`."""
    if name not in _DTYPES:
        raise TandemError(ErrorKind.UNSUPPORTED, f"dtype {name!r} (known: {', '.join(_DTYPES)})", param="dtype")
    return _DTYPES[name]


def num_compute_threads(asked: int) -> int:
    """How many threads a step computes with; 0 asks for all cores that this process may run on."""
    return asked or len(os.sched_getaffinity(0))


def rank_device(device: str, rank: int) -> torch.device:
    """Where a rank computes: of the GPUs that its process sees the one of its number, the last where there are fewer,
    as where each rank is shown its own alone."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, max(0, min(rank, torch.cuda.device_count() - 1)))
