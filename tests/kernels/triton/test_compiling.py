"""What is interpreted here also compiles for a GPU: Triton's compiler checks types that its interpreter does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton import compiling, compiling_batches

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
    assert set(_compile(tmp_path, compiling.__name__, *dtypes)) == _KERNELS | (
        {"_linear_kernel"} if "float32" in dtypes else set()
    )


@pytest.mark.slow
def test_batch_invariant_kernels_are_one_whatever_the_batch(tmp_path: Path) -> None:
    """What is interpreted hides it: there a tile of another size adds up alike."""
    told = _compile(tmp_path, compiling_batches.__name__)
    assert told == [f"{name} 1" for name in compiling_batches.FAMILIES]


def _compile(cache: Path, program: str, *arguments: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-m", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()
