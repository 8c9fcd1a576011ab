"""One tile of paged KV against one tile of query rows, inside a kernel; never loops and stores nothing.

The softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867) in powers of two, as FlashAttention uses it:
`maximum`, `total` and `acc` of a row are its greatest product with a key so far, the sum of
`2**(factor * (product - maximum))`, and that sum weighted by the values. A tile of KV begins at a multiple of its size,
so the order of a row's sums follows from the row's position alone.
"""

import triton
import triton.language as tl

from tandem_kernels.triton.interpret import INTERPRETED, narrow

FUSED = {"enable_fp_fusion": True}
"""Options of a launch. Whether a product and a sum are rounded once or twice does not matter here; speed does."""

LOG2_E = 1.4426950408889634

LEAST: tl.constexpr = tl.constexpr(-1.0e30)
"""The maximum of a row that has seen no token: finite, so that no difference of maxima is not a number."""


@triton.jit
def operand(b_x):
    """What `dot` takes for `b_x`: a half type stays one, for the tensor cores; the interpreter's knows no bfloat16."""
    return b_x.to(tl.float32) if INTERPRETED else b_x


@triton.jit
def as_operand(b_x, DTYPE: tl.constexpr):
    """Keys or values as what they are multiplied with; from float8 to a half type is exact."""
    if b_x.dtype.is_fp8() and DTYPE.is_bf16():
        # Two instructions for two numbers; the direct way takes one of a quarter of the rate for each.
        b_x = b_x.to(tl.float16).to(tl.float32)
    return b_x.to(DTYPE)


@triton.jit
def attend(
    b_query,  # [BLOCK_M, BLOCK_D], as `operand` gives it
    b_acc,  # [BLOCK_M, BLOCK_D] float32
    b_maximum,  # [BLOCK_M] float32
    b_total,  # [BLOCK_M] float32
    b_limits,  # [BLOCK_M], the last token that each row sees
    token,  # the tile's first, a multiple of BLOCK_N and at most `last`
    last,  # the last token of the sequence
    p_table,  # the sequence's
    p_key,  # of the KV head, as the next three
    p_value,
    p_key_scale,  # None: not float8, as the next
    p_value_scale,
    stride_block,
    stride_scale_block,
    factor,  # of products, log2(e) included; more than 0
    DTYPE: tl.constexpr,  # the query's
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees the whole tile
):
    """The tile's tokens, added to `(b_acc, b_maximum, b_total)`."""
    o_tokens = token + tl.arange(0, BLOCK_N)
    o_dims = tl.arange(0, BLOCK_D)
    if BLOCK_SIZE % BLOCK_N == 0:
        # The tile is part of one block: one entry, and fixed offsets from one address.
        block = tl.load(p_table + token // BLOCK_SIZE).to(tl.int64)
        slot = token % BLOCK_SIZE
        p_key += block * stride_block + slot * HEAD_DIM
        p_value += block * stride_block + slot * HEAD_DIM
        o_slots = tl.arange(0, BLOCK_N)
        o_tile = o_slots * HEAD_DIM
        if p_key_scale is not None:
            o_scales = block * stride_scale_block + slot + o_slots
    else:
        # The tile spans blocks. Behind the context there are no entries.
        NUM_BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE
        o_entries = token // BLOCK_SIZE + tl.arange(0, NUM_BLOCKS)
        if MASKED:
            o_entries = tl.minimum(o_entries, last // BLOCK_SIZE)
        # [NUM_BLOCKS]
        b_blocks = tl.load(p_table + o_entries).to(tl.int64)
        o_slots = tl.arange(0, BLOCK_SIZE)
        o_tile = tl.reshape((b_blocks * stride_block)[:, None] + (o_slots * HEAD_DIM)[None, :], [BLOCK_N])
        if HEAD_DIM % 16 == 0 and BLOCK_SIZE % 4 == 0:
            # Not to be seen through `reshape`; float8 tiles have 4 bytes more for each token.
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
    # One instruction for each score, because products and sums may fuse.
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
