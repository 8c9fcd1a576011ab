"""Compute the gating product of a gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `tandem_kernels.contract`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
