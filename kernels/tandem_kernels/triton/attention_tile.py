"""Compute, inside a kernel, the attention of one tile of query rows to one tile of paged KV.

The softmax is online (Milakov and Gimelshein, arXiv 1805.02867) and in powers of two, as in FlashAttention. For a row,
`maximum` is the greatest product with a key so far, `total` the sum of `2**(factor * (product - maximum))`, and `acc`
that sum weighted by the values. A tile of KV begins at a multiple of its size, so the order of a row's sums depends
only on the row's position.
"""

import triton
import triton.language as tl

from tandem_kernels.triton.interpret import INTERPRETED, narrow

FUSED = {"enable_fp_fusion": True}
"""Launch options. Fused multiply-adds are allowed: these kernels need not match the reference's rounding exactly."""

LOG2_E = 1.4426950408889634

LEAST: tl.constexpr = tl.constexpr(-1.0e30)
"""Maximum of a row that has seen no token; finite, so that a difference of maxima is never NaN."""


@triton.jit
def operand(b_x):
    """Convert `b_x` to an operand of `dot`: unchanged for the tensor cores, float32 in the interpreter.

    The interpreter's `dot` does not support bfloat16."""
    return b_x.to(tl.float32) if INTERPRETED else b_x


@triton.jit
def as_operand(b_x, DTYPE: tl.constexpr):
    """Convert keys or values to the dtype of the other operand; from float8 to a half type this is exact."""
    if b_x.dtype.is_fp8() and DTYPE.is_bf16():
        # Two instructions per two elements; the direct conversion takes one per element at a quarter of the rate.
        b_x = b_x.to(tl.float16).to(tl.float32)
    return b_x.to(DTYPE)


@triton.jit
def attend(
    b_query,  # [BLOCK_M, BLOCK_D], the result of `operand`
    b_acc,  # [BLOCK_M, BLOCK_D] float32
    b_maximum,  # [BLOCK_M] float32
    b_total,  # [BLOCK_M] float32
    b_limits,  # [BLOCK_M], the last token that each row sees
    token,  # first token of the tile, a multiple of BLOCK_N and at most `last`
    last,  # last token of the sequence
    p_table,  # block table of the sequence
    p_key,  # at the KV head, like the next three
    p_value,
    p_key_scale,  # None unless the planes are float8
    p_value_scale,  # None unless the planes are float8
    stride_block,
    stride_scale_block,
    factor,  # scale of products times log2(e); more than 0
    DTYPE: tl.constexpr,  # dtype of the query
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees the whole tile
):
    """Add the BLOCK_N tokens of KV from position `token` on to the softmax state of a tile of rows; return the new
    state.

    The state is `(b_acc, b_maximum, b_total)`, see the module docstring. Tokens after `last`, the last token of the
    sequence, have no effect; where MASKED, nor have tokens after a row's entry in `b_limits`.
    """
    o_tokens = token + tl.arange(0, BLOCK_N)
    o_dims = tl.arange(0, BLOCK_D)
    if BLOCK_SIZE % BLOCK_N == 0:
        # The tile is part of one block: one table entry, and constant offsets from one address.
        block = tl.load(p_table + token // BLOCK_SIZE).to(tl.int64)
        slot = token % BLOCK_SIZE
        p_key += block * stride_block + slot * HEAD_DIM
        p_value += block * stride_block + slot * HEAD_DIM
        o_slots = tl.arange(0, BLOCK_N)
        o_tile = o_slots * HEAD_DIM
        if p_key_scale is not None:
            o_scales = block * stride_scale_block + slot + o_slots
    else:
        # The tile spans several blocks. Table entries behind the context must not be used.
        NUM_BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE
        o_entries = token // BLOCK_SIZE + tl.arange(0, NUM_BLOCKS)
        if MASKED:
            o_entries = tl.minimum(o_entries, last // BLOCK_SIZE)
        # [NUM_BLOCKS]
        b_blocks = tl.load(p_table + o_entries).to(tl.int64)
        o_slots = tl.arange(0, BLOCK_SIZE)
        o_tile = tl.reshape((b_blocks * stride_block)[:, None] + (o_slots * HEAD_DIM)[None, :], [BLOCK_N])
        if HEAD_DIM % 16 == 0 and BLOCK_SIZE % 4 == 0:
            # The compiler cannot derive the alignment through `reshape`. Float8 tiles have 4 more bytes per token.
            o_tile = tl.multiple_of(o_tile, 16)
        if p_key_scale is not None:
            o_scales = tl.reshape((b_blocks * stride_scale_block)[:, None] + o_slots[None, :], [BLOCK_N])

    # [BLOCK_N, BLOCK_D]
    if BLOCK_D == HEAD_DIM:
        b_key = tl.load(p_key + o_tile[:, None] + o_dims[None, :])
    else:
        b_key = tl.load(p_key + o_tile[:, None] + o_dims[None, :], mask=o_dims[None, :] < HEAD_DIM, other=0.0)
    # [BLOCK_M, BLOCK_N]. From float8 to a half type is exact; "ieee": no TF32 for float32.
    b_scores = tl.dot(b_query, tl.trans(as_operand(b_key, b_query.dtype)), input_precision="ieee")
    if p_key_scale is not None:
        # [BLOCK_N]
        b_scores *= tl.load(p_key_scale + o_scales)[None, :]
    if MASKED:
        b_scores = tl.where(o_tokens[None, :] <= b_limits[:, None], b_scores, float("-inf"))

    b_greater = tl.maximum(b_maximum, tl.max(b_scores, 1))
    # One fused multiply-add per score.
    b_weights = tl.exp2(b_scores * factor - (b_greater * factor)[:, None])
    b_decay = tl.exp2((b_maximum - b_greater) * factor)
    b_total = b_total * b_decay + tl.sum(b_weights, 1)

    # [BLOCK_N, BLOCK_D]
    if BLOCK_D == HEAD_DIM:
        b_value = tl.load(p_value + o_tile[:, None] + o_dims[None, :])
    else:
        b_value = tl.load(p_value + o_tile[:, None] + o_dims[None, :], mask=o_dims[None, :] < HEAD_DIM, other=0.0)
    if p_value_scale is not None:
        # [BLOCK_N]
        b_weights *= tl.load(p_value_scale + o_scales)[None, :]
    # A weight times a scale can be too small for float16.
    WEIGHTS: tl.constexpr = tl.bfloat16 if p_value_scale is not None and DTYPE.is_fp16() else DTYPE
    b_weights = operand(narrow(b_weights, WEIGHTS))
    b_acc *= b_decay[:, None]
    b_acc = tl.dot(b_weights, as_operand(b_value, b_weights.dtype), b_acc, input_precision="ieee")
    return b_acc, b_greater, b_total
