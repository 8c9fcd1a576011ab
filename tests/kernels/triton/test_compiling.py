"""What is interpreted here also compiles for a GPU: Triton's compiler checks types that its interpreter does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton import compiling, compiling_batches
from tests.kernels.triton.programs import lines_of

_KERNELS = {
    "_norm_kernel",
    "_gate_kernel",
    "_linear_kernel wgmma",
    "_rope_cache_kernel",
    "_copy_kernel",
    "_digest_kernel",
    "_survey_kernel",
    "_draw_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes", [["bfloat16"], pytest.param(["float32", "float16", "float64"], marks=pytest.mark.golden)], ids=len
)
def test_every_kernel_compiles(dtypes: list[str], tmp_path: Path) -> None:
    """For Hopper; that needs no GPU, but a process that does not interpret."""
    unlike_hoppers = {"_linear_kernel"} if "float32" in dtypes else set()
    assert set(lines_of(compiling, tmp_path, *dtypes)) == _KERNELS | unlike_hoppers


@pytest.mark.slow
def test_batch_invariant_kernels_are_one_whatever_the_batch(tmp_path: Path) -> None:
    """What is interpreted hides it: there a tile of another size adds up alike."""
    assert lines_of(compiling_batches, tmp_path) == [f"{name} 1" for name in compiling_batches.FAMILIES]
