"""Rotary position embedding; takes frequencies, never derives them from a configuration."""

from __future__ import annotations

import torch


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tandem_kernels.contract`."""
    half = positions[:, None].to(torch.float32) * inv_freq
    angles = torch.cat((half, half), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `tandem_kernels.contract`."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]
