"""Float weights in the order in which the compiled product reads them; never multiplies.

A panel holds 32 output features (`kPanel` of linear.hpp) as `[k, 32]`, so that the product reads memory in one stream.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_PANEL = 32
_HALF = _PANEL // 2


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """`weight` `[n, k]` -> panels `[ceil(n / 32), k, 32]`; features beyond `n` are zero."""
    return _fill(weight, _PANEL).unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`gate` and `up` `[n, k]` -> the panels `[ceil(n / 16), k, 32]` of one matrix of `2 n` features, for a product
    that gates (`Into.SWIGLU`).

    A panel holds 16 features of gate and then the 16 of up that match; features beyond `n` are zero. The bias of such
    a matrix is what this yields for both biases as `[n, 1]`, flattened. Raises ValueError for unequal shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up need equal shapes, got {tuple(gate.shape)} and {tuple(up.shape)}")
    halves = [_fill(part, _HALF).unflatten(0, (-1, _HALF)) for part in (gate, up)]
    return torch.cat(halves, dim=1).transpose(1, 2).contiguous()


def unpack_linear(panels: torch.Tensor, n: int) -> torch.Tensor:
    """Panels of a matrix back to `[n, k]`."""
    return panels.transpose(1, 2).flatten(0, 1)[:n]


def _fill(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    """`weight` with rows of zeros up to a multiple."""
    return F.pad(weight, (0, 0, 0, -len(weight) % multiple))
