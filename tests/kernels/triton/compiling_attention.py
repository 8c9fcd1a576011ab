"""A program that compiles for a GPU what calls of attention would launch, where none is; runs no kernel.

`python -m tests.kernels.triton.compiling_attention CASE...` takes cases as it names them, or none for all, and prints
a line of JSON for each kernel.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch

from tandem_kernels.triton import chunk, decode
from tandem_kernels.triton.attention import paged_attention
from tests.kernels.triton.attention_cases import SCALE, Case, problem_of
from tests.kernels.triton.compiling import compile_instead

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


def _cases() -> dict[str, Case]:
    """A decode whose context may have several parts, and a chunk."""
    found = {}
    for (dim, size), float8, block_size in itertools.product(decode.TILES, (False, True), (16, 128)):
        name = f"{dim} {'float8' if float8 else _DTYPES[size]} {block_size}"
        case = Case(((1, 600), (70, 70)), 1, 2, 4, dim, block_size, _DTYPES[size], float8)
        found[f"{name} for {_DTYPES[size]}"] = case
    return found


def _compile(case: Case) -> dict[str, Any]:
    """Kernels by their hashes, of which the first word is the name."""
    found: dict[str, Any] = {}
    compile_instead(found)
    problem = problem_of(case, torch.device("cpu"))
    paged_attention(problem.query, problem.kv, problem.batch, SCALE)
    return found


def main(names: list[str]) -> None:
    for name, case in _cases().items():
        if names and name not in names:
            continue
        key = case.head_dim, case.dtype.itemsize
        tiles = {"_split_kernel": decode.TILES[key], "_chunk_kernel": chunk.TILES[key]}
        for kernel, compiled in _compile(case).items():
            kind = kernel.split()[0]
            # Bytes of the tiles of keys and of values that should be on their way.
            size = 1 if case.float8 else case.dtype.itemsize
            ahead = tiles[kind].stages // 2 * 2 * tiles[kind].block_n * case.head_dim * size if kind in tiles else 0
            told = {"case": name, "kernel": kind, "shared": compiled.metadata.shared, "ahead": ahead}
            sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
