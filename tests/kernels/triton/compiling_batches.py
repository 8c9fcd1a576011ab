"""A program that compiles for a GPU what batches of many sizes launch of batch-invariant kernels; runs no kernel.

`python -m tests.kernels.triton.compiling_batches NAME...` prints a line for each of FAMILIES that is named, or for all:
`NAME VARIANTS`. Another variant may be other instructions, and other bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tandem_kernels.contract import HeadNorms, LayerKV
from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.dispatch import Weight
from tandem_kernels.triton import BATCH_INVARIANT
from tests.kernels.triton.attention_cases import SCALE, Case, problem_of
from tests.kernels.triton.compiling import compile_instead, float8_weight, weight_of

ROWS = (1, 2, 3, 8, 16, 33, 64, 65, 128, 129, 4096)
SPANS = (
    (((1, 300),), 1),
    (((1, 1), (1, 64), (1, 16)), 3),
    (((1, 40), (17, 60)), 1),
    (((64, 64),), 0),
    (((1, 100), (2, 5), (3, 300)), 0),
)
_DTYPE, _DIM, _HEADS = torch.bfloat16, 128, 8


def _linear(weight: Weight, bias: torch.Tensor | None = None) -> None:
    for rows in ROWS:
        BATCH_INVARIANT.linear(_zeros(rows, weight.shape[1]), weight, bias)


def _attention(*, float8: bool) -> None:
    for spans, num_decodes in SPANS:
        problem = problem_of(Case(spans, num_decodes, 2, 4, _DIM, 16, _DTYPE, float8), torch.device("cpu"))
        BATCH_INVARIANT.paged_attention(problem.query, problem.kv, problem.batch, SCALE)


def _norm() -> None:
    for rows in ROWS:
        BATCH_INVARIANT.add_rms_norm(_zeros(rows, 4096), _zeros(rows, 4096), _zeros(4096), 1e-5)


def _gate() -> None:
    for rows in ROWS:
        BATCH_INVARIANT.silu_mul(_zeros(rows, 4096))


def _rope() -> None:
    pool, norm = _zeros(4, 2, 2, 2, 16, _DIM), _zeros(_DIM)
    for rows in ROWS:
        table, slots = _zeros(rows, _DIM), torch.zeros(rows, dtype=torch.int64, device="meta")
        layer, norms = LayerKV(pool[:, :, 1, 0], pool[:, :, 1, 1]), HeadNorms(norm, norm, 1e-6)
        BATCH_INVARIANT.rope_cache_write(_zeros(rows, _HEADS * _DIM), table, table, norms, layer, slots)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=_DTYPE, device="meta")


def _coded(n: int, k: int, name: str = "q8_0") -> DeviceCodes:
    with torch.device("meta"):
        return weight_of(name, n, k)


def _float8(n: int, k: int) -> DeviceCodes:
    with torch.device("meta"):
        return float8_weight(n, k)


def _experts(*matrices: Weight) -> None:
    for rows in ROWS:
        chosen = torch.zeros(rows, 2, dtype=torch.int64, device="meta")
        BATCH_INVARIANT.mix_experts(_zeros(rows, 256), chosen, _zeros(rows, 2), *matrices)


FAMILIES: dict[str, Callable[[], None]] = {
    "linear": lambda: _linear(_zeros(96, 256), _zeros(96)),
    "wide-linear": lambda: _linear(_zeros(20_000, 256), _zeros(20_000)),
    "attention": lambda: _attention(float8=False),
    "float8-attention": lambda: _attention(float8=True),
    "linear-of-codes": lambda: _linear(_coded(96, 256, "q4_k")),
    "linear-of-float8": lambda: _linear(_float8(96, 256)),
    "experts": lambda: _experts(_zeros(16, 2 * 192, 256), _zeros(16, 256, 192)),
    "experts-of-codes": lambda: _experts(*(_coded(16 * n, k).split_rows(16) for n, k in ((2 * 192, 256), (256, 192)))),
    "norm": _norm,
    "gate": _gate,
    "rope": _rope,
}


_KERNELS_OF = {"experts": 3, "experts-of-codes": 3, "linear-of-float8": 2}
"""Kernels that a call launches, where there are several."""


def main(names: list[str]) -> None:
    found: dict[str, Any] = {}
    compile_instead(found)
    for name in names or FAMILIES:
        found.clear()
        FAMILIES[name]()
        sys.stdout.write(f"{name} {len(found) // _KERNELS_OF.get(name, 1)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
