"""Copy ranges of heads of KV blocks to contiguous memory and back on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.interpret import UNFUSED

# Words of one program, and its warps: with 8-byte words, four 16-byte copies per thread.
_BLOCK, _WARPS = 1024, 4
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_kernel(
    p_pool,
    p_packed,
    p_blocks,
    block_stride,
    head_stride,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTO_POOL: tl.constexpr,
):
    """Copy part of one head of one block. `p_pool` points to the first copied head of block 0."""
    i_block, i_head = tl.program_id(0), tl.program_id(1)
    o_word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < WORDS
    block = tl.load(p_blocks + i_block)
    p_slab = p_pool + block * block_stride + i_head.to(tl.int64) * head_stride + o_word
    p_piece = p_packed + (i_block.to(tl.int64) * tl.num_programs(1) + i_head) * WORDS + o_word
    # [BLOCK]
    if INTO_POOL:
        tl.store(p_slab, tl.load(p_piece, mask=m_word), mask=m_word)
    else:
        tl.store(p_piece, tl.load(p_slab, mask=m_word), mask=m_word)


def pack_blocks(pool: torch.Tensor, block_ids: torch.Tensor, head_start: int, head_stop: int) -> torch.Tensor:
    """Copy the KV heads `[head_start, head_stop)` of blocks `block_ids` of the pool to new contiguous memory, and
    return it. The exact result is defined in `tandem_kernels.contract`."""
    shape = (len(block_ids), head_stop - head_start, *pool.shape[2:])
    packed = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    _copy(pool[:, head_start:head_stop], packed, block_ids, into_pool=False)
    return packed


def unpack_blocks(packed: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor, head_start: int) -> None:
    """Copy `packed`, the result of `pack_blocks`, to the KV heads from `head_start` on of blocks `block_ids` of the
    pool. The exact result is defined in `tandem_kernels.contract`."""
    _copy(pool[:, head_start : head_start + packed.shape[1]], packed.contiguous(), block_ids, into_pool=True)


def as_words(heads: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Return a view `[N, G, words]` of heads of blocks `[N, G, ...]`, each contiguous, as integers of the dtype
    `word`."""
    return heads.view(*heads.shape[:2], -1).view(word)


def _copy(heads: torch.Tensor, packed: torch.Tensor, block_ids: torch.Tensor, *, into_pool: bool) -> None:
    """Copy between blocks of the pool and packed memory, in the largest words that fit."""
    if not packed.numel():
        return
    word = next(word for word in _WORDS if _fits(heads, word))
    slabs = as_words(heads, word)
    words = slabs.shape[2]
    _copy_kernel[(len(block_ids), packed.shape[1], triton.cdiv(words, _BLOCK))](
        slabs,
        as_words(packed, word),
        block_ids,
        slabs.stride(0),
        slabs.stride(1),
        WORDS=words,
        BLOCK=_BLOCK,
        INTO_POOL=into_pool,
        num_warps=_WARPS,
        **UNFUSED,
    )


def _fits(heads: torch.Tensor, word: torch.dtype) -> bool:
    """Return whether every head of every block begins and ends at a multiple of the word size."""
    item = heads.element_size()
    extents = (heads[0, 0].numel(), heads.stride(0), heads.stride(1), heads.storage_offset())
    return all(extent * item % word.itemsize == 0 for extent in extents)
