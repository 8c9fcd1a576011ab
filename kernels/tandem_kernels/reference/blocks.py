"""Copy ranges of heads of KV blocks to contiguous memory and back."""

from __future__ import annotations

import torch


def pack_blocks(pool: torch.Tensor, block_ids: torch.Tensor, head_start: int, head_stop: int) -> torch.Tensor:
    """See `tandem_kernels.contract`."""
    return pool[:, head_start:head_stop].index_select(0, block_ids)


def unpack_blocks(packed: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor, head_start: int) -> None:
    """See `tandem_kernels.contract`."""
    pool[:, head_start : head_start + packed.shape[1]].index_copy_(0, block_ids, packed)
