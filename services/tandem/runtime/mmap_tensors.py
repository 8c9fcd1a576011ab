"""Write named tensors to one file and map them back, with pages shared by all processes of a machine.

Every tensor begins at a multiple of 4096 bytes: safetensors guarantee no alignment, and the compiled kernels read at
full speed only from cache-line boundaries.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

_ALIGNMENT = 4096
_DATA, _INDEX = "tensors.bin", "tensors.json"
_DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8)
}


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write (name, tensor) pairs to files in the existing directory `folder`, for `read_tensors`.

    The iterable is consumed one tensor at a time, so that a generator needs memory for one tensor only."""
    index: dict[str, dict[str, object]] = {}
    with (folder / _DATA).open("wb") as data:
        for name, tensor in tensors:
            data.seek(-data.tell() % _ALIGNMENT, 1)
            dtype = str(tensor.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": data.tell()}
            data.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def read_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors that `write_tensors` wrote to `folder`, by name.

    They are memory-mapped: pages are read on first use."""
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    with (folder / _DATA).open("rb") as data:
        # A private mapping is writable, which torch.frombuffer expects; pages stay shared as long as nobody writes.
        memory = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _tensor(memory, entry) for name, entry in index.items()}


def _tensor(memory: mmap.mmap, entry: dict[str, object]) -> torch.Tensor:
    dtype, shape, offset = _DTYPES[str(entry["dtype"])], entry["shape"], entry["offset"]
    assert isinstance(shape, list) and isinstance(offset, int)
    count = torch.Size(shape).numel()
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
