"""Batches over a shuffled pool and what attention must make of them; runs no kernel."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from tandem_kernels.contract import FLOAT8, AttentionBatch, LayerKV
from tandem_kernels.reference import cache_write, paged_attention
from tests.kernels.batches import attention_batch
from tests.kernels.triton.tensors import ROUNDOFF

LAYERS, LAYER = 2, 1
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """`spans` are (rows, context) of each sequence, of which the first `num_decodes` have one row. `heads` are KV
    heads, `group` the query heads of each."""

    spans: tuple[tuple[int, int], ...]
    num_decodes: int
    heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    float8: bool = False

    def __str__(self) -> str:
        name = f"{self.dtype}".removeprefix("torch.") + ("-float8" if self.float8 else "")
        spans = "+".join(f"{rows}of{context}" for rows, context in self.spans)
        return f"{name}-d{self.head_dim}-b{self.block_size}-g{self.heads}x{self.group}-{spans}"


@dataclass(frozen=True)
class Problem:
    query: torch.Tensor
    kv: LayerKV
    batch: AttentionBatch


def pool_of(case: Case, num_blocks: int) -> tuple[torch.Tensor, LayerKV]:
    """A pool of zeros, and the planes of its layer LAYER."""
    block, dim = case.block_size, case.head_dim
    if not case.float8:
        pool = torch.zeros((num_blocks, case.heads, LAYERS, 2, block, dim), dtype=case.dtype)
        return pool, LayerKV(pool[:, :, LAYER, 0], pool[:, :, LAYER, 1])
    pool = torch.zeros((num_blocks, case.heads, LAYERS, 2, block * (dim + 4)), dtype=torch.uint8)
    return pool, float8_planes(pool, LAYER, block, dim)


def float8_planes(pool: torch.Tensor, layer: int, block: int, dim: int) -> LayerKV:
    tiles = [pool[:, :, layer, plane] for plane in (0, 1)]
    numbers = [t[..., : block * dim].view(FLOAT8).view(*t.shape[:2], block, dim) for t in tiles]
    scales = [t[..., block * dim :].view(torch.float32) for t in tiles]
    return LayerKV(*numbers, *scales)


def problem_of(case: Case, device: torch.device, extra_width: int = 0) -> Problem:
    """The case in shuffled blocks; whatever is no token's is large. Tables are `extra_width` wider than needed."""
    torch.manual_seed(3)
    rng = random.Random(5)
    needed = [-(-context // case.block_size) for _, context in case.spans]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    pool, kv = pool_of(case, len(free))
    everything = torch.arange(len(free) * case.block_size)
    garbage = 30 * torch.randn((2, len(everything), case.heads, case.head_dim)).to(case.dtype)
    cache_write(garbage[0], garbage[1], kv, everything)
    tables = []
    for (_, context), count in zip(case.spans, needed, strict=True):
        blocks, free = free[:count], free[count:]
        key, value = torch.randn((2, context, case.heads, case.head_dim)).to(case.dtype)
        places = torch.arange(context)
        slots = torch.tensor(blocks, dtype=torch.int64)[places // case.block_size] * case.block_size
        cache_write(key, value, kv, slots + places % case.block_size)
        padding = max(needed) + extra_width - count
        tables.append(blocks + rng.choices(range(len(pool)), k=padding))
    num_rows = sum(rows for rows, _ in case.spans)
    query = torch.randn((num_rows, case.heads * case.group, case.head_dim)).to(case.dtype)
    batch = attention_batch(case.spans, tables, case.num_decodes, device)
    return Problem(query.to(device), on_device(case, pool, device), batch)


def on_device(case: Case, pool: torch.Tensor, device: torch.device) -> LayerKV:
    pool = pool.to(device)
    if case.float8:
        return float8_planes(pool, LAYER, case.block_size, case.head_dim)
    return LayerKV(pool[:, :, LAYER, 0], pool[:, :, LAYER, 1])


def expected(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the sums of the weighted values without their signs: what an error of a weight or of
    the result is relative to."""
    key, value = _wide(problem.kv)
    batch = replace(
        problem.batch,
        query_starts=problem.batch.query_starts.cpu(),
        context_lens=problem.batch.context_lens.cpu(),
        block_tables=problem.batch.block_tables.cpu(),
    )
    query = problem.query.cpu().double()
    return (
        paged_attention(query, LayerKV(key, value), batch, SCALE),
        paged_attention(query, LayerKV(key, value.abs()), batch, SCALE),
    )


def assert_close(out: torch.Tensor, problem: Problem) -> None:
    """A half type rounds each weight once and the result once, below its normal numbers to a multiple of the least.
    All else is float32, whose errors in a score, a sum of up to 256 products, move a weight by at most as many
    roundoffs as the products' magnitudes sum to, some 50; the sums over tokens and their parts add a few."""
    dtype = problem.query.dtype
    assert out.dtype == dtype
    exact, magnitude = expected(problem)
    roundoff = ROUNDOFF[dtype]
    is_float8 = problem.kv.key_scale is not None
    weights = ROUNDOFF[torch.bfloat16] if is_float8 and dtype == torch.float16 else roundoff
    least = torch.finfo(dtype).smallest_normal * roundoff
    allowed = weights * magnitude + roundoff * exact.abs() + 60 * ROUNDOFF[torch.float32] * magnitude + least
    error = (out.cpu().double() - exact).abs()
    assert bool((error <= allowed).all()), f"{float((error / allowed).max()):.2f} of what is allowed"


def _wide(kv: LayerKV) -> list[torch.Tensor]:
    planes = ((kv.key, kv.key_scale), (kv.value, kv.value_scale))
    return [
        plane.cpu().float().double() * (1.0 if scale is None else scale.cpu().double()[..., None])
        for plane, scale in planes
    ]
