"""The attention kernels compiled for sm_90, without a GPU: that they compile, and what they need of it.

The interpreter takes much that the compiler does not; and whether loads run ahead is decided by the compiler alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper."""


def _compile(cache: Path, *names: str) -> list[dict[str, Any]]:
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(root / place) for place in ("services", "kernels", ".")),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-m", "tests.kernels.triton.compile_attention", *names]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(kernel: dict[str, Any]) -> None:
    # All the pairs of tiles that should be on their way have a place, or the compiler does not load ahead.
    assert kernel["pairs"] * kernel["pair"] <= kernel["shared"] <= _SHARED, kernel


def test_kernels_of_each_kind(tmp_path: Path) -> None:
    names = ("split d128 *bf16 b16", "chunk d128 *bf16 float8 b128", "join d128 *bf16")
    found = _compile(tmp_path, *names)
    assert {kernel["kernel"] for kernel in found} == set(names)
    for kernel in found:
        _check(kernel)


@pytest.mark.golden
def test_all_kernels(tmp_path: Path) -> None:
    found = _compile(tmp_path)
    assert len(found) == 54
    for kernel in found:
        _check(kernel)
