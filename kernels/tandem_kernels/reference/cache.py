"""Write rows to paged KV, and gather it into dense memory."""

from __future__ import annotations

import torch

from tandem_kernels.contract import FLOAT8, FLOAT8_MAX, LayerKV


def cache_write(key: torch.Tensor, value: torch.Tensor, kv: LayerKV, slots: torch.Tensor) -> None:
    """Write the keys and values `[T, G, D]` of rows to the slots `slots` of one layer of the pool; rows with a negative
    slot are skipped. The exact result is defined in `tandem_kernels.contract`."""
    if bool((slots < 0).any()):
        has_slot = slots >= 0
        key, value, slots = key[has_slot], value[has_slot], slots[has_slot]
    blocks, offsets = slots // kv.block_size, slots % kv.block_size
    for rows, plane, scales in ((key, kv.key, kv.key_scale), (value, kv.value, kv.value_scale)):
        if scales is not None:
            rows, scale = quantize_float8(rows)
            scales[blocks, :, offsets] = scale
        plane[blocks, :, offsets] = rows


def quantize_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `[..., D]` quantised to float8, and float32 scales `[...]`, one for each row: about `rows =
    float8 * scale`."""
    wide = rows.to(torch.float32)
    scale = wide.abs().amax(-1) / FLOAT8_MAX
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    return (wide / scale[..., None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale


def gather(plane: torch.Tensor, scales: torch.Tensor | None, tables: torch.Tensor) -> torch.Tensor:
    """Gather the blocks of block tables from one plane into dense memory, dequantised to float32 if it has scales.

    `plane` is `[N, G, B, D]`, one plane of one layer; `tables` is int64 `[S, W]`. Returns a new `[S, G, W * B, D]`.
    """
    if scales is not None:
        wide = plane[tables].to(torch.float32) * scales[tables][..., None]
        return wide.transpose(1, 2).flatten(2, 3)
    _, heads, block_size, head_dim = plane.shape
    tiles, step = _tiles(plane)
    first = tables[:, None, :] * heads + torch.arange(heads)[None, :, None]
    rows = tiles.index_select(0, (first * step).flatten())
    return rows.view(len(tables), heads, tables.shape[1] * block_size, head_dim)


def _tiles(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the memory from the plane's first tile to its last as dense `[tiles, B * D]`, and the stride of the
    plane's own tiles in tiles.

    Selecting rows of a dense matrix is several times faster than of a strided one. Raises ValueError for a tensor that
    is not a plane of a KV pool."""
    num_blocks, heads, block_size, head_dim = cache.shape
    tile = block_size * head_dim
    outer, inner, slot, item = cache.stride()
    if (slot, item) != (head_dim, 1) or outer != heads * inner or inner % tile:
        raise ValueError(f"not a plane of a KV pool: shape {tuple(cache.shape)}, strides {cache.stride()}")
    step = inner // tile
    return cache.as_strided(((num_blocks * heads - 1) * step + 1, tile), (tile, 1)), step
