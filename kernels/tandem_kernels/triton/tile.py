"""One tile of paged KV against one tile of query rows, inside a kernel; never loops and stores nothing.

The softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867) in powers of two, as FlashAttention uses it:
`maximum`, `total` and `acc` of a row are the greatest score so far, the sum of `2**(score - maximum)`, and that sum
weighted by the values. A tile of KV begins at a multiple of its size, so the order of a row's sums follows from the
row's position alone.
"""

import triton
import triton.language as tl

from tandem_kernels.triton.interpret import INTERPRETED, narrow

FUSED = {"enable_fp_fusion": True}
"""Options of a launch. Whether a product and a sum are rounded once or twice does not matter here; speed does."""

LOG2_E = 1.4426950408889634

LEAST: tl.constexpr = tl.constexpr(-1.0e38)
"""The maximum of a row that has seen no token: finite, so that no difference of maxima is not a number."""


@triton.jit
def operand(b_x):
    """What `dot` takes for `b_x`: a half type stays one, for the tensor cores; the interpreter's knows no bfloat16."""
    return b_x.to(tl.float32) if INTERPRETED else b_x


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
    factor,  # of scores, log2(e) included
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
        # The tile spans blocks: an entry for each of its tokens. Behind the context there are no entries.
        o_known = tl.minimum(o_tokens, last) if MASKED else o_tokens
        # [BLOCK_N]
        b_blocks = tl.load(p_table + o_known // BLOCK_SIZE).to(tl.int64)
        o_slots = o_known % BLOCK_SIZE
        o_tile = b_blocks * stride_block + o_slots * HEAD_DIM
        if p_key_scale is not None:
            o_scales = b_blocks * stride_scale_block + o_slots

    # [BLOCK_N, BLOCK_D]
    if BLOCK_D == HEAD_DIM:
        b_key = tl.load(p_key + o_tile[:, None] + o_dims[None, :])
    else:
        b_key = tl.load(p_key + o_tile[:, None] + o_dims[None, :], mask=o_dims[None, :] < HEAD_DIM, other=0.0)
    # [BLOCK_M, BLOCK_N]. From float8 to a half type is exact; "ieee": no TF32 for float32.
    b_scores = tl.dot(b_query, tl.trans(b_key.to(b_query.dtype)), input_precision="ieee") * factor
    if p_key_scale is not None:
        # [BLOCK_N]
        b_scores *= tl.load(p_key_scale + o_scales)[None, :]
    if MASKED:
        b_scores = tl.where(o_tokens[None, :] <= b_limits[:, None], b_scores, float("-inf"))

    b_greater = tl.maximum(b_maximum, tl.max(b_scores, 1))
    b_weights = tl.exp2(b_scores - b_greater[:, None])
    b_decay = tl.exp2(b_maximum - b_greater)
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
    b_acc = tl.dot(b_weights, b_value.to(b_weights.dtype), b_acc, input_precision="ieee")
    return b_acc, b_greater, b_total
