"""Writes to and gathers from paged KV; never computes attention."""

from __future__ import annotations

import torch


def cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `tandem_kernels.contract`."""
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def gather(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The KV of block tables as dense memory.

    `cache` `[N, G, B, D]` is one plane of one layer, `tables` int64 `[S, W]`; yields a new `[S, G, W * B, D]`.
    """
    _, heads, block_size, head_dim = cache.shape
    tiles, step = _tiles(cache)
    first = tables[:, None, :] * heads + torch.arange(heads)[None, :, None]
    rows = tiles.index_select(0, (first * step).flatten())
    return rows.view(len(tables), heads, tables.shape[1] * block_size, head_dim)


def _tiles(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The memory from the plane's first tile to its last as dense `[tiles, B * D]`, and how many tiles apart the
    plane's own are: selecting rows of a dense matrix is several times faster than of a strided one."""
    num_blocks, heads, block_size, head_dim = cache.shape
    tile = block_size * head_dim
    outer, inner, slot, item = cache.stride()
    if (slot, item) != (head_dim, 1) or outer != heads * inner or inner % tile:
        raise ValueError(f"not a plane of a KV pool: shape {tuple(cache.shape)}, strides {cache.stride()}")
    step = inner // tile
    return cache.as_strided(((num_blocks * heads - 1) * step + 1, tile), (tile, 1)), step
