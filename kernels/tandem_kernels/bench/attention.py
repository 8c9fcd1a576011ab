"""Build the cases of paged attention: decodes, chunks, block sizes, number formats and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from tandem_kernels.bench.case import Bench, BenchCase, BenchWork, CaseUnavailable
from tandem_kernels.bench.grid import Grid, Shape
from tandem_kernels.bench.pools import (
    Pool,
    batch_over,
    block_pool,
    layer_pool,
    layers_within,
    normal,
    num_blocks_of,
    token_bytes,
)
from tandem_kernels.bench.sdpa_baseline import prompt_attention
from tandem_kernels.contract import FLOAT8, AttentionBatch

_Layout = Callable[[Bench, Shape, torch.dtype, int, int, int], Pool]

HALF_TOLERANCE = 1e-2
"""Largest relative difference, in the norm, between two implementations of attention in bf16 or fp16. Each rounds its
result, and its softmax weights before the second product."""


def attention_cases(grid: Grid) -> Iterator[BenchCase]:
    """Yield the attention cases, the most important ones first in case the time runs out."""
    distinct = list({shape.attention: shape for shape in grid.shapes}.values())
    batch, context = grid.typical_decode
    rows, cached = grid.typical_chunk
    for shape in distinct:
        for each in grid.contexts:
            for count in grid.batches:
                yield _decode("decode", shape, [each] * count)
    for shape in distinct:
        for before in grid.cached:
            for new in grid.chunks:
                yield _chunk("chunk", shape, new, before)
    first = distinct[0]
    for contexts in grid.uneven:
        yield _decode("uneven", first, sorted(contexts))
    yield _mixed(first, grid)
    for size in grid.block_sizes:
        yield _decode("block size", first, [context] * batch, block_size=size)
        yield _chunk("block size", first, rows, cached, block_size=size)
    for dtype in (torch.float16, FLOAT8):
        yield _decode("number format", first, [context] * batch, dtype=dtype)
        yield _chunk("number format", first, rows, cached, dtype=dtype)


def layout_cases(grid: Grid) -> Iterator[BenchCase]:
    """Yield the same decodes over pools of the two layouts, as large as the device's memory allows."""
    shape = grid.shapes[0]
    for count, context in grid.layout_decodes:
        for size in grid.block_sizes:
            for layout, name in ((block_pool, "blocks contiguous"), (layer_pool, "layers outermost")):
                yield _full_size(shape, [context] * count, size, layout, name)


def _decode(
    group: str,
    shape: Shape,
    contexts: Sequence[int],
    *,
    block_size: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchCase:
    """Build a case with one row for each context. SDPA is a rival if all contexts are equal, so that it needs no
    padding."""

    def build(bench: Bench) -> BenchWork:
        size = block_size or bench.grid.block_size
        pool = _pool(bench, shape, dtype, size, contexts)
        return _work(bench, shape, pool, [1] * len(contexts), contexts)

    return BenchCase(group, f"{_name(shape, dtype, block_size)} {_contexts_name(contexts)}", build)


def _chunk(
    group: str, shape: Shape, rows: int, cached: int, *, block_size: int = 0, dtype: torch.dtype = torch.bfloat16
) -> BenchCase:
    """Build a case with `rows` rows of one prompt behind `cached` tokens of context."""

    def build(bench: Bench) -> BenchWork:
        size = block_size or bench.grid.block_size
        pool = _pool(bench, shape, dtype, size, [cached + rows])
        return _work(bench, shape, pool, [rows], [cached + rows])

    return BenchCase(group, f"{_name(shape, dtype, block_size)} {rows} rows on {cached} cached", build)


def _mixed(shape: Shape, grid: Grid) -> BenchCase:
    decodes, context, rows, chunk_context = grid.mixed
    contexts = [context] * decodes + [chunk_context]

    def build(bench: Bench) -> BenchWork:
        pool = _pool(bench, shape, torch.bfloat16, bench.grid.block_size, contexts)
        return _work(bench, shape, pool, [1] * decodes + [rows], contexts)

    name = f"{_name(shape, torch.bfloat16, 0)} {decodes} x {context} and {rows} rows at {chunk_context}"
    return BenchCase("mixed", name, build)


def _full_size(shape: Shape, contexts: Sequence[int], block_size: int, layout: _Layout, name: str) -> BenchCase:
    def build(bench: Bench) -> BenchWork:
        dtype = torch.bfloat16
        block_bytes = block_size * token_bytes(shape, dtype) * shape.layers
        needed = num_blocks_of(contexts, block_size)
        num_blocks = max(needed, int(bench.grid.pool_share * bench.memory_bytes) // block_bytes)
        if bench.is_cuda and num_blocks * block_bytes > bench.memory_bytes * 0.9:
            raise CaseUnavailable(f"a pool of {num_blocks * block_bytes >> 30} GiB")
        pool = layout(bench, shape, dtype, block_size, num_blocks, shape.layers)
        return _work(bench, shape, pool, [1] * len(contexts), contexts, has_rivals=False)

    return BenchCase("layout", f"{_name(shape, torch.bfloat16, block_size)} {_contexts_name(contexts)}, {name}", build)


def _pool(bench: Bench, shape: Shape, dtype: torch.dtype, block_size: int, contexts: Sequence[int]) -> Pool:
    """Build a pool with as many of the model's layers as fit the memory."""
    num_blocks = num_blocks_of(contexts, block_size)
    room = min(bench.grid.case_bytes, int(0.4 * bench.memory_bytes))
    layers = layers_within(shape, dtype, num_blocks * block_size, room)
    return block_pool(bench, shape, dtype, block_size, num_blocks, layers)


def _work(
    bench: Bench,
    shape: Shape,
    pool: Pool,
    rows: Sequence[int],
    contexts: Sequence[int],
    *,
    has_rivals: bool = True,
) -> BenchWork:
    kv, dtype = pool.layer, pool.layer.key.dtype
    compute = torch.bfloat16 if dtype == FLOAT8 else dtype
    query = normal(bench, sum(rows), shape.heads, shape.head_dim, dtype=compute)
    batch = batch_over(bench, rows, contexts, kv.block_size, pool.num_blocks)
    scale = shape.head_dim**-0.5
    pairs = sum(count * context - count * (count - 1) // 2 for count, context in zip(rows, contexts, strict=True))
    has_dense = has_rivals and dtype != FLOAT8 and len({*zip(rows, contexts, strict=True)}) == 1
    agreeing = {"SDPA": _sdpa(pool, query, batch, scale)} if has_dense else {}
    if has_dense and list(rows) == list(contexts) and batch.max_rows > 1:
        agreeing["SDPA and its gather"] = lambda: prompt_attention(query, kv, batch, scale)
    return BenchWork(
        run=lambda: bench.kernels.paged_attention(query, kv, batch, scale),
        num_bytes=sum(contexts) * token_bytes(shape, dtype) + 2 * query.nbytes,
        flops=4 * pairs * shape.heads * shape.head_dim,
        agreeing=agreeing,
        tolerance=HALF_TOLERANCE,
    )


def _sdpa(pool: Pool, query: torch.Tensor, batch: AttentionBatch, scale: float) -> Callable[[], torch.Tensor]:
    """Return a call of torch's attention over dense KV, for sequences of equal rows and contexts; result `[T, H, D]`.

    The first call gathers the dense KV. Decodes need no mask; chunks use `causal_lower_right`, which FlashAttention
    supports.
    """
    from torch.nn.attention.bias import causal_lower_right  # imported late: it takes a second

    kv, (heads, dim) = pool.layer, query.shape[1:]
    sequences, groups = batch.num_sequences, kv.key.shape[1]
    rows = len(query) // sequences

    @cache
    def dense() -> list[torch.Tensor]:
        context = int(batch.context_lens[0])
        tables = batch.block_tables.long()
        planes = [
            plane[tables].transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous() for plane in (kv.key, kv.value)
        ]
        return planes if rows == 1 else [plane.repeat_interleave(heads // groups, dim=1) for plane in planes]

    def decode() -> torch.Tensor:
        # The query heads of a KV head become query rows, so that its keys are read once.
        q = query.view(sequences, groups, heads // groups, dim)
        keys, values = dense()
        return F.scaled_dot_product_attention(q, keys, values, scale=scale).view(-1, heads, dim)

    def chunk() -> torch.Tensor:
        q = query.view(sequences, rows, heads, dim).transpose(1, 2)
        keys, values = dense()
        mask = causal_lower_right(rows, keys.shape[2])
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return mixed.transpose(1, 2).reshape(-1, heads, dim)

    return decode if rows == 1 else chunk


def _name(shape: Shape, dtype: torch.dtype, block_size: int) -> str:
    blocks = f" blocks of {block_size}" if block_size else ""
    return f"{shape.attention} {str(dtype).removeprefix('torch.')}{blocks}"


def _contexts_name(contexts: Sequence[int]) -> str:
    counts = {context: contexts.count(context) for context in sorted(set(contexts))}
    if len(counts) > 2:
        return f"{len(contexts)} of {min(contexts)} to {max(contexts)}"
    return " and ".join(f"{count} x {context}" for context, count in counts.items())
