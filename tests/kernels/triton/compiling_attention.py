"""A program that compiles for a GPU what calls of attention would launch, where none is; runs no kernel.

`python -m tests.kernels.triton.compiling_attention CASE...` takes cases as it names them, or none for all, and prints
a line of JSON for each kernel: `shared` bytes that a program takes, `ahead` of them that tiles of keys and of values on
their way should take, `stack` bytes a thread, which hold what registers do not, and `wgmma`, whether products are
Hopper's own.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tandem_kernels.triton import decode_attention, prefill_attention
from tandem_kernels.triton.attention import paged_attention, row_attention
from tests.kernels.triton.attention_cases import SCALE, Case, problem_of
from tests.kernels.triton.compiling import compile_instead, stack_of

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


def _cases() -> dict[str, Case]:
    """A decode whose context may have several parts, and a chunk."""
    found = {}
    for (dim, size), float8, block_size in itertools.product(decode_attention.TILES, (False, True), (16, 128)):
        name = f"{dim} {'float8' if float8 else _DTYPES[size]} {block_size}"
        case = Case(((1, 600), (70, 70)), 1, 2, 4, dim, block_size, _DTYPES[size], float8)
        found[f"{name} for {_DTYPES[size]}"] = case
    return found


_Tiles = decode_attention.DecodeTiles | prefill_attention.PrefillTiles
_VARIANTS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Mapping[tuple[int, int], Any]]]] = {
    "usual": (paged_attention, {"_split_kernel": decode_attention.TILES, "_chunk_kernel": prefill_attention.TILES}),
    "batch-invariant": (row_attention, {"_chunk_kernel": prefill_attention.ROW_TILES}),
}


def _compile(case: Case, attention: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Kernels by their hashes, of which the first word is the name."""
    found: dict[str, Any] = {}
    compile_instead(found)
    problem = problem_of(case, torch.device("cpu"))
    attention(problem.query, problem.kv, problem.batch, SCALE)
    return found


def _ahead(tiles: _Tiles | None, case: Case) -> int:
    size = 1 if case.float8 else case.dtype.itemsize
    return 0 if tiles is None else tiles.stages // 2 * 2 * tiles.block_n * case.head_dim * size


def main(names: list[str]) -> None:
    for (name, case), (variant, (attention, tables)) in itertools.product(_cases().items(), _VARIANTS.items()):
        title = f"{name}, {variant}"
        if names and title not in names:
            continue
        tiles = {kernel: table[case.head_dim, case.dtype.itemsize] for kernel, table in tables.items()}
        for kernel, compiled in _compile(case, attention).items():
            kind = kernel.split()[0]
            row = {
                "case": title,
                "kernel": kind,
                "shared": compiled.metadata.shared,
                "ahead": _ahead(tiles.get(kind), case),
                "stack": stack_of(compiled.asm["cubin"]),
                "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
            }
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
