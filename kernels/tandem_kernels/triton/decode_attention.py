"""Compute attention of sequences with few rows over long contexts, with each context split over several programs.

The method is flash-decoding (Dao, Haziza, Massa and Sizov, 2023): the query heads of a KV head and a sequence's rows
are one tile, and the context is divided among *parts*, whose results a second kernel joins. The division depends only
on the number of KV heads: a context is cut into slices of a fixed number of tokens, and part p processes the slices p,
p + parts, p + 2 parts, ... in this order. So the order of a row's sums, and with it the last bit of its result, depends
on its position and the model, but not on other sequences, the width of the block table, or the number of programs,
which only process the parts in turn. A launch depends only on shapes, so a CUDA graph can capture it; programs of parts
that a context does not reach return at once.

The bytes in flight to one SM should exceed bandwidth times latency: on an H200, 4.3 TB/s times about 1 us over 132 SMs
is 32 KiB. At head size 128 in half precision a tile of keys and one of values are 32 KiB, a program has one or two such
pairs in flight, and three programs fit on an SM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.contract import SCRATCH_BYTES, AttentionBatch, LayerKV
from tandem_kernels.triton.attention_tile import FUSED, LEAST, LOG2_E, attend, operand
from tandem_kernels.triton.interpret import narrow

MAX_PACKED_ROWS = 64
"""Most rows of a sequence times query heads per KV head for this kernel; with more, the prefill kernel is faster."""

_LEAST_PACKED = 16
"""Least rows of a tile, required by the tensor cores."""

_PARTS_OF_ALL_HEADS = 256
"""Programs for one long sequence, over all its KV heads: about two per SM."""

_PROGRAMS, _LEAST_PROGRAMS = 2048, 4
"""Target number of programs of a launch, and least number for one KV head of a sequence. More programs balance unequal
contexts better; a program without work costs about a nanosecond of the whole GPU."""

_JOINED = 16
"""Parts that the join kernel holds in registers at once."""


class DecodeTiles(NamedTuple):
    """Tile sizes and launch options of the decode kernel.

    A program reads `block_n` tokens of KV at a time; contexts are divided among programs in slices of `slice_tokens`, a
    multiple of `block_n`. `warps` and `stages` are Triton's launch options: `stages // 2` tiles are in shared memory,
    because the compiler loads table entries as many steps ahead of the tiles as it loads tiles ahead of their use. With
    3 or 4 stages no tile is in flight while one is computed.
    """

    block_n: int
    slice_tokens: int
    warps: int
    stages: int


TILES = {
    # (head size rounded up to a power of two, bytes of an element of the query)
    (64, 2): DecodeTiles(128, 512, 4, 5),
    (128, 2): DecodeTiles(64, 256, 4, 5),
    (256, 2): DecodeTiles(32, 256, 4, 5),
    (64, 4): DecodeTiles(32, 512, 8, 5),
    (128, 4): DecodeTiles(32, 256, 8, 5),
    (256, 4): DecodeTiles(16, 256, 8, 5),
}
"""Chosen by the compiled code for sm_90 (registers, spills, shared memory), not yet by measured time."""


@triton.jit(
    do_not_specialize=["first", "stride_table", "stride_part"],
    do_not_specialize_on_alignment=["p_starts", "p_contexts", "p_tables"],
)
def _split_kernel(
    p_out,  # [T, H, HEAD_DIM]
    p_partial,  # [rows, H, stride_part, HEAD_DIM] float32
    p_partial_lse,  # [rows, H, stride_part] float32
    p_query,
    p_key,
    p_value,
    p_key_scale,
    p_value_scale,
    p_starts,
    p_contexts,
    p_tables,
    factor,
    first,  # first sequence of the launch; its first row is row 0 of the partial results
    stride_part,
    stride_row,
    stride_block,
    stride_head,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Heads are innermost, so that the heads of a block, which share a memory page, are read at about the same time.
    i_head, i_seq, i_program = tl.program_id(0), first + tl.program_id(1), tl.program_id(2)
    context = tl.load(p_contexts + i_seq)
    num_slices = tl.cdiv(context, SLICE)
    num_parts = tl.minimum(num_slices, PARTS)
    # A padding sequence has no slice; its first program writes the zeros.
    if i_program >= tl.maximum(num_parts, 1):
        return

    base, start = tl.load(p_starts + first), tl.load(p_starts + i_seq)
    num_rows = tl.load(p_starts + i_seq + 1) - start
    num_heads = tl.num_programs(0) * GROUP
    DTYPE: tl.constexpr = p_query.dtype.element_ty

    # Rows are packed as (row, head of the KV head), heads innermost.
    o_packed = tl.arange(0, BLOCK_M)
    o_dims = tl.arange(0, BLOCK_D)
    o_rows = o_packed // GROUP
    m_rows = o_rows < num_rows
    b_limits = tl.minimum(context - num_rows + o_rows, context - 1)
    # [BLOCK_M]; the heads of a row are contiguous
    o_heads = i_head * GROUP + o_packed % GROUP
    o_query = (start + o_rows).to(tl.int64) * stride_row + o_heads * HEAD_DIM
    m_tile = m_rows[:, None] & (o_dims[None, :] < HEAD_DIM)
    # [BLOCK_M, BLOCK_D]
    b_query = operand(tl.load(p_query + o_query[:, None] + o_dims[None, :], mask=m_tile, other=0.0))

    # Tile offsets are 64 bits wide, because a pool may have more than 2**31 elements.
    p_table = p_tables + i_seq.to(tl.int64) * stride_table
    p_key += i_head.to(tl.int64) * stride_head
    p_value += i_head.to(tl.int64) * stride_head
    if p_key_scale is not None:
        p_key_scale += i_head.to(tl.int64) * stride_scale_head
        p_value_scale += i_head.to(tl.int64) * stride_scale_head

    TILES: tl.constexpr = SLICE // BLOCK_N
    for i_part in range(i_program, tl.maximum(num_parts, 1), tl.num_programs(2)):
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_maximum = tl.full([BLOCK_M], LEAST, tl.float32)
        b_total = tl.zeros([BLOCK_M], tl.float32)
        # All slices of a part are full, except the last slice of the sequence.
        before = tl.maximum(tl.cdiv(num_slices - i_part, PARTS) - 1, 0)
        rest = tl.minimum(context - (i_part + before * PARTS) * SLICE, SLICE)
        for i in tl.range(0, before * TILES + tl.cdiv(rest, BLOCK_N), num_stages=STAGES):
            token = (i_part + i // TILES * PARTS) * SLICE + i % TILES * BLOCK_N
            b_acc, b_maximum, b_total = attend(
                b_query, b_acc, b_maximum, b_total, b_limits, token, context - 1, p_table, p_key, p_value,
                p_key_scale, p_value_scale, stride_block, stride_scale_block, factor,
                DTYPE, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, MASKED=True,
            )  # fmt: skip
        # A row of a chunk may attend to no token of a part.
        b_divisor = tl.where(b_total > 0, b_total, 1.0)
        b_result = b_acc / b_divisor[:, None]
        if num_parts <= 1:
            o_out = (start + o_rows).to(tl.int64) * num_heads + o_heads
            p_tile = p_out + (o_out * HEAD_DIM)[:, None] + o_dims[None, :]
            tl.store(p_tile, narrow(b_result, DTYPE), mask=m_tile)
        else:
            o_partial = ((start - base + o_rows).to(tl.int64) * num_heads + o_heads) * stride_part + i_part
            tl.store(p_partial + (o_partial * HEAD_DIM)[:, None] + o_dims[None, :], b_result, mask=m_tile)
            b_lse = tl.where(b_total > 0, b_maximum * factor + tl.log2(b_divisor), float("-inf"))
            tl.store(p_partial_lse + o_partial, b_lse, mask=m_rows)


@triton.jit(
    do_not_specialize=["first", "stride_part"],
    do_not_specialize_on_alignment=["p_starts", "p_contexts"],
)
def _join_kernel(
    p_out,
    p_partial,
    p_partial_lse,
    p_starts,
    p_contexts,
    first,
    stride_part,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_head, i_seq, i_row = tl.program_id(0), first + tl.program_id(1), tl.program_id(2)
    num_parts = tl.minimum(tl.cdiv(tl.load(p_contexts + i_seq), SLICE), PARTS)
    base, start = tl.load(p_starts + first), tl.load(p_starts + i_seq)
    if (num_parts <= 1) | (i_row >= tl.load(p_starts + i_seq + 1) - start):
        return
    o_row = (start - base + i_row).to(tl.int64) * tl.num_programs(0) + i_head
    p_partial_lse += o_row * stride_part
    p_partial += o_row * stride_part * HEAD_DIM

    o_parts = tl.arange(0, PARTS)
    # [PARTS]; every row attends to a token of part 0, so the greatest is finite
    b_lse = tl.load(p_partial_lse + o_parts, mask=o_parts < num_parts, other=float("-inf"))
    greatest = tl.max(b_lse, 0)
    total = tl.sum(tl.exp2(b_lse - greatest), 0)

    o_dims = tl.arange(0, BLOCK_D)
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(0, num_parts, BLOCK_P):
        o_chunk = i + tl.arange(0, BLOCK_P)
        m_chunk = o_chunk < num_parts
        # [BLOCK_P], [BLOCK_P, BLOCK_D]
        b_weights = tl.exp2(tl.load(p_partial_lse + o_chunk, mask=m_chunk, other=float("-inf")) - greatest)
        m_tile = m_chunk[:, None] & (o_dims[None, :] < HEAD_DIM)
        b_tile = tl.load(p_partial + (o_chunk * HEAD_DIM)[:, None] + o_dims[None, :], mask=m_tile, other=0.0)
        b_acc += tl.sum(b_weights[:, None] * b_tile, 0)

    o_out = (start + i_row).to(tl.int64) * tl.num_programs(0) + i_head
    b_result = narrow(b_acc / total, p_out.dtype.element_ty)
    tl.store(p_out + o_out * HEAD_DIM + o_dims, b_result, mask=o_dims < HEAD_DIM)


def split_attention(
    query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float, out: torch.Tensor, span: range, max_rows: int
) -> None:
    """Compute `contract.paged_attention` of the sequences with indices in `span`, and write it to their rows of `out`.

    Each context is split over several programs. No sequence may have more than `max_rows` rows, and `max_rows * H / G`
    may be at most MAX_PACKED_ROWS. If tables are wide enough for all parts of a context, partial results take `256 * H
    / G * D` floats per row: 34 MB times `H / G` for 256 decodes with D = 128. The work is divided into enough launches
    to keep that within SCRATCH_BYTES.
    """
    num_heads, head_dim = query.shape[1:]
    _, reached = _parts(query, kv, batch)
    most = max(1, SCRATCH_BYTES // (4 * max_rows * num_heads * reached * (head_dim + 1)))
    for first in range(span.start, span.stop, most):
        _launch(query, kv, batch, scale, out, range(first, min(first + most, span.stop)), max_rows)


def _parts(query: torch.Tensor, kv: LayerKV, batch: AttentionBatch) -> tuple[int, int]:
    """Return the number of parts of a context, and how many the longest context that fits the tables reaches."""
    parts = max(1, triton.next_power_of_2(_PARTS_OF_ALL_HEADS // kv.key.shape[1]))
    slots = batch.block_tables.shape[1] * kv.block_size
    return parts, max(1, min(parts, -(-slots // _tiles(query).slice_tokens)))


def _tiles(query: torch.Tensor) -> DecodeTiles:
    return TILES[max(triton.next_power_of_2(query.shape[2]), 64), query.element_size()]


def _launch(
    query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float, out: torch.Tensor, span: range, max_rows: int
) -> None:
    num_rows, num_heads, head_dim = query.shape
    groups = kv.key.shape[1]
    block_d = triton.next_power_of_2(head_dim)
    tiles, (parts, reached) = _tiles(query), _parts(query, kv, batch)
    programs = min(reached, max(_LEAST_PROGRAMS, -(-_PROGRAMS // (len(span) * groups))))
    # Each sequence has at least one row, so at least `span.start` rows precede the span.
    rows = min(num_rows - span.start, len(span) * max_rows) if reached > 1 else 0
    partial = torch.empty((rows, num_heads, reached, head_dim), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((rows, num_heads, reached), dtype=torch.float32, device=query.device)
    scale_strides = (0, 0) if kv.key_scale is None else kv.key_scale.stride()[:2]
    _split_kernel[groups, len(span), programs](
        out,
        partial,
        partial_lse,
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
        reached,
        query.stride(0),
        *kv.key.stride()[:2],
        *scale_strides,
        batch.block_tables.stride(0),
        GROUP=num_heads // groups,
        PARTS=parts,
        SLICE=tiles.slice_tokens,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=max(_LEAST_PACKED, triton.next_power_of_2(max_rows * num_heads // groups)),
        BLOCK_N=tiles.block_n,
        BLOCK_SIZE=kv.block_size,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **FUSED,
    )
    if reached > 1:
        _join_kernel[num_heads, len(span), max_rows](
            out,
            partial,
            partial_lse,
            batch.query_starts,
            batch.context_lens,
            span.start,
            reached,
            PARTS=parts,
            SLICE=tiles.slice_tokens,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_P=_JOINED,
            num_warps=4,
            **FUSED,
        )
