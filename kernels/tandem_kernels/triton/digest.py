"""Compute digests of KV blocks on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels import contract
from tandem_kernels.triton.blocks import as_words
from tandem_kernels.triton.interpret import UNFUSED

# Words of one load, words of one program, and its warps. The programs of a slab add atomically to one digest; modulo
# 2**64 the order does not matter.
_BLOCK, _SPAN, _WARPS = 1024, 8192, 4

_WORD: tl.constexpr = tl.constexpr(contract.DIGEST_WORD)
_MULTIPLIER: tl.constexpr = tl.constexpr(contract.DIGEST_MULTIPLIER)
_HEAD: tl.constexpr = tl.constexpr(contract.DIGEST_HEAD)
_BLOCK_SALT: tl.constexpr = tl.constexpr(contract.DIGEST_BLOCK)


@triton.jit(do_not_specialize=["head_start"])
def _digest_kernel(
    p_pool,
    p_blocks,
    p_indices,
    p_digests,
    block_stride,
    head_stride,
    head_start,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_block, i_head, i_span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.load(p_blocks + i_block)
    p_slab = p_pool + block * block_stride + i_head.to(tl.int64) * head_stride
    b_sums = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, SPAN, BLOCK):
        o_word = i_span * SPAN + start + tl.arange(0, BLOCK)
        m_word = o_word < WORDS
        # [BLOCK]
        b_word = tl.load(p_slab + o_word, mask=m_word, other=0)
        b_mixed = (b_word ^ (o_word.to(tl.int64) * _WORD)) * _MULTIPLIER
        # Signed words: the shift copies their sign.
        b_sums += tl.where(m_word, b_mixed ^ (b_mixed >> 32), 0)
    total = tl.sum(b_sums, axis=0)
    if i_span == 0:
        total += (head_start + i_head + 1).to(tl.int64) * _HEAD + (tl.load(p_indices + i_block) + 1) * _BLOCK_SALT
    tl.atomic_add(p_digests + i_block.to(tl.int64) * tl.num_programs(1) + i_head, total, sem="relaxed")


def block_digest(
    pool: torch.Tensor, block_ids: torch.Tensor, block_indices: torch.Tensor, *, head_start: int = 0
) -> torch.Tensor:
    """Return the digests `[n, G]` of the KV heads of blocks `block_ids`, as `block_digest` in `tandem_kernels.contract`
    defines them. Raises ValueError like `digest_words`."""
    words = contract.digest_words(pool)
    digests = torch.zeros((len(block_ids), pool.shape[1]), dtype=torch.int64, device=pool.device)
    if not digests.numel():
        return digests
    slabs = as_words(pool, torch.int64)
    _digest_kernel[(*digests.shape, triton.cdiv(words, _SPAN))](
        slabs,
        block_ids,
        block_indices,
        digests,
        slabs.stride(0),
        slabs.stride(1),
        head_start,
        WORDS=words,
        SPAN=_SPAN,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        **UNFUSED,
    )
    return digests
