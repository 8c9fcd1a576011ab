"""What is interpreted here also compiles for a GPU: Triton's compiler checks types that its interpreter does not, and
decides alone whether loads run ahead, registers hold what they should, and products are Hopper's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton import compiling_batches
from tests.kernels.triton.programs import lines_of

_KERNELS = {
    "_norm_kernel",
    "_gate_kernel",
    "_linear_kernel wgmma",
    "_gate_up_kernel",
    "_gate_up_kernel wgmma",
    "_down_kernel",
    "_down_kernel wgmma",
    "_sum_kernel",
    "_rope_cache_kernel",
    "_copy_kernel",
    "_digest_kernel",
    "_chunk_stats_kernel",
    "_sample_kernel",
}
_OF_CODES = {
    f"{kernel} of {numbers}{instruction}"
    for kernel in ("_linear_kernel", "_gate_up_kernel", "_down_kernel")
    for numbers in ("codes", "float8")
    for instruction in ("", " wgmma")
} | {"_sum_kernel", "_round_kernel"}
_SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper."""
_SPILLED = 64
"""Bytes of a thread that registers do not hold, where any: addresses, of heads of 256."""
_QUICK = ["linear", "linear-of-codes", "linear-of-float8", "norm", "gate", "rope"]
"""Families of kernels that compile within a second; the others are the same in wide tiles, and attention."""


def _check_attention(lines: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for kernel in found:
        assert kernel["ahead"] <= kernel["shared"] <= _SHARED, kernel
        is_half = "for torch.bfloat16" in kernel["case"]
        assert kernel["stack"] <= _SPILLED or not is_half, kernel
        assert kernel["wgmma"] == (is_half and kernel["kernel"] == "_chunk_kernel"), kernel
    return found


def test_every_kernel_compiles(tmp_path: Path) -> None:
    """For Hopper and bfloat16; that needs no GPU, but a process that does not interpret."""
    assert set(lines_of({"compiling": ["bfloat16"]}, tmp_path)["compiling"]) == _KERNELS


def test_every_product_of_codes_compiles(tmp_path: Path) -> None:
    assert set(lines_of({"compiling": ["bfloat16", "codes"]}, tmp_path)["compiling"]) == _OF_CODES


@pytest.mark.nightly
def test_every_kernel_compiles_for_other_types(tmp_path: Path) -> None:
    found = lines_of({"compiling": ["float32", "float16", "float64"]}, tmp_path / "others")["compiling"]
    assert set(found) == _KERNELS | {"_linear_kernel"}, "products of float32 are not Hopper's own"
    codes = lines_of({"compiling": ["float32", "float16", "every-format"]}, tmp_path / "codes")["compiling"]
    assert set(codes) >= _OF_CODES


def test_every_kernel_of_attention_compiles(tmp_path: Path) -> None:
    case = ["128 float8 16 for torch.bfloat16, usual"]
    found = _check_attention(lines_of({"compiling_attention": case}, tmp_path)["compiling_attention"])
    assert {kernel["kernel"] for kernel in found} == {"_split_kernel", "_join_kernel", "_chunk_kernel"}


@pytest.mark.nightly
def test_attention_compiles_with_all_of_the_tables(tmp_path: Path) -> None:
    found = _check_attention(lines_of({"compiling_attention": []}, tmp_path)["compiling_attention"])
    assert len({kernel["case"] for kernel in found}) == 48


def test_batch_invariant_kernels_are_one_whatever_the_batch(tmp_path: Path) -> None:
    """What is interpreted hides it: there a tile of another size adds up alike."""
    assert lines_of({"compiling_batches": _QUICK}, tmp_path)["compiling_batches"] == [f"{name} 1" for name in _QUICK]


@pytest.mark.nightly
def test_other_batch_invariant_kernels_are_one_whatever_the_batch(tmp_path: Path) -> None:
    names = [name for name in compiling_batches.FAMILIES if name not in _QUICK]
    assert lines_of({"compiling_batches": names}, tmp_path)["compiling_batches"] == [f"{name} 1" for name in names]
