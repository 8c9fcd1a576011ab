"""Attention compiled for a GPU: that it compiles, and what the compiler alone decides: loads run ahead, registers hold
what they should, and chunks are multiplied by Hopper's own instructions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton import compiling_attention
from tests.kernels.triton.programs import lines_of

pytestmark = pytest.mark.slow

_SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper."""
_SPILLED = 64
"""Bytes of a thread that registers do not hold, where any: addresses, of heads of 256."""


def _compile(cache: Path, *cases: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(compiling_attention, cache, *cases)]


def _check(kernel: dict[str, Any]) -> None:
    assert kernel["ahead"] <= kernel["shared"] <= _SHARED, kernel
    is_half = "for torch.bfloat16" in kernel["case"]
    assert kernel["stack"] <= _SPILLED or not is_half, kernel
    assert kernel["wgmma"] == (is_half and kernel["kernel"] == "_chunk_kernel"), kernel


def test_each_kernel(tmp_path: Path) -> None:
    found = _compile(tmp_path, "128 float8 16 for torch.bfloat16")
    assert {kernel["kernel"] for kernel in found} == {"_split_kernel", "_join_kernel", "_chunk_kernel"}
    for kernel in found:
        _check(kernel)


@pytest.mark.golden
def test_all_of_the_tables(tmp_path: Path) -> None:
    found = _compile(tmp_path)
    assert len({kernel["case"] for kernel in found}) == 48
    for kernel in found:
        _check(kernel)
