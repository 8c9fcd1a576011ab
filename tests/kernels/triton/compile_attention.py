"""Compiles the attention kernels for sm_90, which takes no GPU, and prints what each needs; launches nothing.

Takes names of kernels, as it prints them, or none for all. A program of its own: a process either compiles kernels or
interprets them.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem_kernels.triton import chunk, decode
from tandem_kernels.triton.tile import FUSED

_TABLES = ("p_starts", "p_contexts", "p_tables")
_UNALIGNED = (*_TABLES, "first", "stride_table", "stride_part", "factor")
_NUMBERS = {2: "*bf16", 4: "*fp32"}


def compiled(kernel: Any, query: str, float8: bool, constants: dict[str, Any], warps: int) -> Any:
    """As the wrappers' arguments would have it compiled, of a pool whose strides are multiples of 16."""
    scale = "*fp32" if float8 else "constexpr"
    types = {"p_out": query, "p_query": query, "p_partial": "*fp32", "p_partial_lse": "*fp32", "factor": "fp32"}
    types |= dict.fromkeys(("p_key", "p_value"), "*fp8e4nv" if float8 else query)
    types |= dict.fromkeys(("p_key_scale", "p_value_scale"), scale) | dict.fromkeys(_TABLES, "*i32")
    names = [p.name for p in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: constants.get(name) for name in names if signature[name] == "constexpr"},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name] != "constexpr" and name not in _UNALIGNED
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **FUSED})


def jobs() -> Iterator[tuple[str, dict[str, int], Callable[[], Any]]]:
    """Of each kernel its name, what is known of it, and how to compile it."""
    for (dim, size), float8, block_size in itertools.product(decode._TILES, (False, True), (16, 128)):
        few, many = decode._TILES[dim, size], chunk._TILES[dim, size]
        common = {"GROUP": 4, "HEAD_DIM": dim, "BLOCK_D": dim, "BLOCK_SIZE": block_size}
        split = {"PARTS": 32, "SLICE": few.slice_tokens, "BLOCK_M": 16, "BLOCK_N": few.block_n, "STAGES": few.stages}
        rows = {"BLOCK_M": many.block_m, "BLOCK_N": many.block_n, "STAGES": many.stages}
        of = f"d{dim} {_NUMBERS[size]} {'float8 ' * float8}b{block_size}"
        for name, kernel, constants, tiles in (
            (f"split {of}", decode._split_kernel, split, few),
            (f"chunk {of}", chunk._chunk_kernel, rows, many),
        ):
            known = {"pair": 2 * tiles.block_n * dim * (1 if float8 else size), "pairs": tiles.stages // 2}
            yield name, known, partial(compiled, kernel, _NUMBERS[size], float8, common | constants, tiles.warps)
    for (dim, size), tiles in decode._TILES.items():
        join = {"PARTS": 32, "SLICE": tiles.slice_tokens, "HEAD_DIM": dim, "BLOCK_D": dim, "BLOCK_P": decode._JOINED}
        known = {"pair": 0, "pairs": 0}
        yield (
            f"join d{dim} {_NUMBERS[size]}",
            known,
            partial(compiled, decode._join_kernel, _NUMBERS[size], False, join, 4),
        )


def main(names: list[str]) -> None:
    for name, known, build in jobs():
        if name in names or not names:
            sys.stdout.write(json.dumps({"kernel": name, **known, "shared": build().metadata.shared}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
