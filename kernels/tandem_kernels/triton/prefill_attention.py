"""Compute attention of chunks of many rows over paged contexts, with one program per tile of rows.

The method is FlashAttention-2 (Dao, arXiv 2307.08691) with the query heads of a KV head packed into the rows of a tile,
so that a key is read once for all of them. A row processes tiles of KV in ascending order from token 0. A tile that is
masked for a row adds zeros times finite numbers, which do not change a sum. So a row's result depends on its position
and the model, but not on where its chunk begins or which other rows are in the tile.

Head sizes are padded to a power of two: 96 costs the matrix units a third more than necessary, 80 three fifths more.
Splitting them into 64 + 32 and 64 + 16 would avoid that, but needs two of each product and accumulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.contract import AttentionBatch, LayerKV
from tandem_kernels.triton.attention_tile import FUSED, LEAST, LOG2_E, attend, operand
from tandem_kernels.triton.interpret import narrow


class PrefillTiles(NamedTuple):
    """Tile sizes and launch options of the prefill kernel.

    A program computes `block_m` rows at a time, where each query head that shares the KV head counts as a row, and
    reads `block_n` tokens of KV at a time. `warps` and `stages` are Triton's launch options: `stages // 2` tiles of
    keys and of values are in shared memory, see `decode_attention.DecodeTiles`.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


TILES = {
    # (head size rounded up to a power of two, bytes of an element of the query)
    (64, 2): PrefillTiles(128, 64, 8, 5),
    (128, 2): PrefillTiles(128, 64, 8, 5),
    (256, 2): PrefillTiles(128, 32, 8, 5),
    (64, 4): PrefillTiles(64, 32, 8, 3),
    (128, 4): PrefillTiles(32, 16, 8, 3),
    (256, 4): PrefillTiles(32, 16, 8, 3),
}
"""Chosen by the compiled code for sm_90 (registers, spills, shared memory), not yet by measured time."""

ROW_TILES = TILES | {
    (64, 2): PrefillTiles(64, 64, 4, 5),
    (128, 2): PrefillTiles(64, 64, 4, 5),
    (256, 2): PrefillTiles(64, 32, 4, 5),
}
"""Tiles of `row_attention`, for chunks and decodes alike. Most rows of a decode's tile are empty, so these have the
least height that Hopper's own matrix instructions support."""


@triton.jit(
    do_not_specialize=["first", "stride_table"],
    do_not_specialize_on_alignment=["p_starts", "p_contexts", "p_tables"],
)
def _chunk_kernel(
    p_out,  # [T, H, HEAD_DIM]
    p_query,
    p_key,
    p_value,
    p_key_scale,
    p_value_scale,
    p_starts,
    p_contexts,
    p_tables,
    factor,
    first,  # first sequence of the launch
    stride_row,
    stride_block,
    stride_head,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Later rows attend to more tokens, so the programs of the last rows start first, for all heads.
    i_head, i_seq = tl.program_id(0), first + tl.program_id(2)
    i_packed = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    start = tl.load(p_starts + i_seq)
    num_rows = tl.load(p_starts + i_seq + 1) - start
    if i_packed >= num_rows * GROUP:
        return
    context = tl.load(p_contexts + i_seq)
    num_heads = tl.num_programs(0) * GROUP
    DTYPE: tl.constexpr = p_query.dtype.element_ty

    # Rows are packed as (row, head of the KV head), heads innermost; a tile may end between two heads of a row.
    o_packed = i_packed + tl.arange(0, BLOCK_M)
    o_dims = tl.arange(0, BLOCK_D)
    o_rows = o_packed // GROUP
    m_tile = (o_rows < num_rows)[:, None] & (o_dims[None, :] < HEAD_DIM)
    b_limits = tl.minimum(context - num_rows + o_rows, context - 1)
    # [BLOCK_M]; the heads of a row are contiguous
    o_heads = i_head * GROUP + o_packed % GROUP
    o_query = (start + o_rows).to(tl.int64) * stride_row + o_heads * HEAD_DIM
    # [BLOCK_M, BLOCK_D]
    b_query = operand(tl.load(p_query + o_query[:, None] + o_dims[None, :], mask=m_tile, other=0.0))

    # Tile offsets are 64 bits wide, because a pool may have more than 2**31 elements.
    p_table = p_tables + i_seq.to(tl.int64) * stride_table
    p_key += i_head.to(tl.int64) * stride_head
    p_value += i_head.to(tl.int64) * stride_head
    if p_key_scale is not None:
        p_key_scale += i_head.to(tl.int64) * stride_scale_head
        p_value_scale += i_head.to(tl.int64) * stride_scale_head

    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_maximum = tl.full([BLOCK_M], LEAST, tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    # All rows of the tile attend to tokens [0, seen), and none to tokens from `stop` on.
    seen = context - num_rows + i_packed // GROUP + 1
    stop = tl.minimum(context - num_rows + (i_packed + BLOCK_M - 1) // GROUP + 1, context)
    num_whole = seen // BLOCK_N
    for i in tl.range(0, num_whole, num_stages=STAGES):
        b_acc, b_maximum, b_total = attend(
            b_query, b_acc, b_maximum, b_total, b_limits, i * BLOCK_N, context - 1, p_table, p_key, p_value,
            p_key_scale, p_value_scale, stride_block, stride_scale_block, factor,
            DTYPE, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, MASKED=False,
        )  # fmt: skip
    for i in tl.range(num_whole, tl.cdiv(stop, BLOCK_N), num_stages=STAGES):
        b_acc, b_maximum, b_total = attend(
            b_query, b_acc, b_maximum, b_total, b_limits, i * BLOCK_N, context - 1, p_table, p_key, p_value,
            p_key_scale, p_value_scale, stride_block, stride_scale_block, factor,
            DTYPE, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, MASKED=True,
        )  # fmt: skip
    # A padding sequence attends to nothing and yields zeros.
    b_result = b_acc / tl.where(b_total > 0, b_total, 1.0)[:, None]
    o_out = ((start + o_rows).to(tl.int64) * num_heads + o_heads) * HEAD_DIM
    tl.store(p_out + o_out[:, None] + o_dims[None, :], narrow(b_result, DTYPE), mask=m_tile)


def chunk_attention(
    query: torch.Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor,
    span: range,
    max_rows: int,
    tiles_of: Mapping[tuple[int, int], PrefillTiles] = TILES,
) -> None:
    """Compute `contract.paged_attention` of the sequences with indices in `span`, and write it to their rows of `out`.

    No sequence may have more than `max_rows` rows. `tiles_of` maps (padded head size, bytes of an element) to tile
    sizes.
    """
    _, num_heads, head_dim = query.shape
    groups = kv.key.shape[1]
    block_d = triton.next_power_of_2(head_dim)
    tiles = tiles_of[max(block_d, 64), query.element_size()]
    num_tiles = -(-max_rows * (num_heads // groups) // tiles.block_m)
    scale_strides = (0, 0) if kv.key_scale is None else kv.key_scale.stride()[:2]
    _chunk_kernel[groups, num_tiles, len(span)](
        out,
        query,
        kv.key,
        kv.value,
        kv.key_scale,
        kv.value_scale,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        scale * LOG2_E,
        span.start,
        query.stride(0),
        *kv.key.stride()[:2],
        *scale_strides,
        batch.block_tables.stride(0),
        GROUP=num_heads // groups,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_SIZE=kv.block_size,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **FUSED,
    )
