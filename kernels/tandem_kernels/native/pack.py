"""Pack float weights in the order in which the compiled product reads them.

A panel holds 32 output features (`kPanel` of panel.hpp) as `[k, 32]`, so that the product reads memory in one stream.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PANEL = 32
_HALF = PANEL // 2


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Pack `weight` `[n, k]` into panels `[ceil(n / 32), k, 32]`; features beyond `n` are zero."""
    return features(weight, PANEL).transpose(1, 2).contiguous()


def gate_up_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave `gate` and `up` `[n, k]` to rows `[32 * ceil(n / 16), k]` of one matrix, for use with `Into.SWIGLU`.

    After packing, a panel holds 16 features of gate and the matching 16 of up; features beyond `n` are zero. The bias
    of such a matrix is this function's result for both biases as `[n, 1]`, flattened. Raises ValueError for unequal
    shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up need equal shapes, got {tuple(gate.shape)} and {tuple(up.shape)}")
    return torch.cat([features(gate, _HALF), features(up, _HALF)], dim=1).flatten(0, 1)


def unpack_linear(panels: torch.Tensor, n: int) -> torch.Tensor:
    """Unpack the panels of `pack_linear` to `[n, k]`."""
    return panels.transpose(1, 2).flatten(0, 1)[:n]


def features(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape `weight` `[n, c]` to `[ceil(n / size), size, c]`, padded with rows of zeros."""
    return F.pad(weight, (0, 0, 0, -len(weight) % size)).reshape(-1, size, weight.shape[1])
