"""Compute root-mean-square normalisation and the gating product of a gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` divided by the root mean square of its last dimension and multiplied by `weight`. The exact result is
    defined in `tandem_kernels.contract`."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm(x + residual, weight, eps)` and the sum `x + residual`. The exact result is defined in
    `tandem_kernels.contract`."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gating product of an MLP, `silu(gate) * up`, of the two halves `gate` and `up` of each row of
    `gate_up` `[T, 2 * I]`. The exact result is defined in `tandem_kernels.contract`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
