"""Compute rotary position embeddings from given inverse frequencies."""

from __future__ import annotations

import torch

from tandem_kernels.contract import HeadNorms, LayerKV
from tandem_kernels.reference.cache import cache_write
from tandem_kernels.reference.norm import rms_norm


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines `[T, D]` with which `rope` rotates rows at `positions`, multiplied by `scale` where
    components are rotated. The exact result is defined in `tandem_kernels.contract`."""
    half = positions[:, None].to(torch.float32) * inv_freq
    angles = torch.cat((half, half), dim=-1)
    scales: float | torch.Tensor = scale
    if scale != 1:
        scales = torch.full_like(inv_freq, scale).masked_fill_(inv_freq == 0, 1.0).repeat(2)
    return (angles.cos() * scales).to(dtype), (angles.sin() * scales).to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the heads `x` `[T, heads, D]` rotated by the tables of `rope_tables`. The exact result is defined in
    `tandem_kernels.contract`."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]


def rope_cache_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: LayerKV,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Normalise (unless `norms` is None) and rotate the query and key heads in `qkv`, write keys and values to `slots`
    of the pool, and return the queries `[T, H, D]`. The exact result is defined in `tandem_kernels.contract`."""
    _, groups, _, dim = kv.key.shape
    heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
    query = heads[:, : -2 * groups]
    key, value = heads[:, -2 * groups :].chunk(2, dim=1)
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    cache_write(rope(key, cos, sin), value, kv, slots)
    return rope(query, cos, sin)
