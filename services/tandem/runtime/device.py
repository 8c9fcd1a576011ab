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
