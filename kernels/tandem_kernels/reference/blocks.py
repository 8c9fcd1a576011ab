"""Copy ranges of heads of KV blocks to contiguous memory and back, and compute digests of KV blocks."""

from __future__ import annotations

import torch

from tandem_kernels.contract import DIGEST_BLOCK, DIGEST_HEAD, DIGEST_MULTIPLIER, DIGEST_WORD, digest_words


def pack_blocks(pool: torch.Tensor, block_ids: torch.Tensor, head_start: int, head_stop: int) -> torch.Tensor:
    """Copy the KV heads `[head_start, head_stop)` of blocks `block_ids` of the pool to new contiguous memory, and
    return it. The exact result is defined in `tandem_kernels.contract`."""
    return pool[:, head_start:head_stop].index_select(0, block_ids)


def unpack_blocks(packed: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor, head_start: int) -> None:
    """Copy `packed`, the result of `pack_blocks`, to the KV heads from `head_start` on of blocks `block_ids` of the
    pool. The exact result is defined in `tandem_kernels.contract`."""
    pool[:, head_start : head_start + packed.shape[1]].index_copy_(0, block_ids, packed)


def block_digest(
    pool: torch.Tensor, block_ids: torch.Tensor, block_indices: torch.Tensor, *, head_start: int = 0
) -> torch.Tensor:
    """Return the digests `[n, G]` of the KV heads of blocks `block_ids`, as `block_digest` in `tandem_kernels.contract`
    defines them. Raises ValueError like `digest_words`."""
    heads = pool.shape[1]
    salts = torch.arange(digest_words(pool)) * DIGEST_WORD
    sums = torch.empty((len(block_ids), heads), dtype=torch.int64)
    # One block at a time, so that it and the intermediate words stay in the cache of a core.
    for row, block in enumerate(block_ids.tolist()):
        sums[row] = _slab_sums(pool[block].view(heads, -1).view(torch.int64), salts)
    head_salts = (torch.arange(head_start, head_start + heads) + 1) * DIGEST_HEAD
    return sums + head_salts + ((block_indices + 1) * DIGEST_BLOCK)[:, None]


def _slab_sums(words: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
    """Sum the mixed words of each head: `words` int64 `[heads, W]`, `salts` int64 `[W]` -> int64 `[heads]`."""
    mixed = torch.bitwise_xor(words, salts)
    mixed.mul_(DIGEST_MULTIPLIER)
    mixed.bitwise_xor_(mixed >> 32)
    return mixed.sum(-1)
