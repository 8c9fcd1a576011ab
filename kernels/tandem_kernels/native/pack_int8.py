"""Int8 weights in the order in which the compiled product reads them; never multiplies.

A panel holds 32 output channels (`kPanel` of linear.hpp) as quads of 4 input components (`kQuad` of linear_int8.hpp),
each byte a value + 128. Scales follow panels and channels, so that a panel's are together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels.reference.linear_int8 import quantize_weight

_PANEL = 32
_HALF = _PANEL // 2
_QUAD = 4
_ZERO = 128


def pack_linear_int8(weight: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` `[n, k]` -> panels uint8 `[ceil(n / 32), k / 4, 32, 4]`, scales float32 `[ceil(n / 32), k / group, 32]`.

    Channels beyond `n` are zero, and so are their scales. Raises ValueError as `quantize_weight`.
    """
    return _pack(*quantize_weight(weight, group))


def pack_gate_up_int8(
    gate: torch.Tensor, up: torch.Tensor, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate` and `up` `[n, k]` -> panels `[ceil(n / 16), k / 4, 32, 4]` and scales of one matrix of `2 n` channels, for
    a product that gates (`Into.SWIGLU`).

    A panel holds 16 channels of gate and then the 16 of up that match; channels beyond `n` are zero. The bias of such a
    matrix is laid out as `pack.pack_gate_up` says. Raises ValueError for unequal shapes, and as `quantize_weight`.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up need equal shapes, got {tuple(gate.shape)} and {tuple(up.shape)}")
    pairs = torch.cat([_blocks(gate, _HALF), _blocks(up, _HALF)], dim=1)
    return pack_linear_int8(pairs.flatten(0, 1), group)


def unpack_int8(panels: torch.Tensor, n: int) -> torch.Tensor:
    """Panels of a matrix `[n, k]` back to its int8 values."""
    values = panels.transpose(1, 2).flatten(2).flatten(0, 1)[:n]
    return (values.to(torch.int16) - _ZERO).to(torch.int8)


def _pack(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    channels = _blocks(values, _PANEL).to(torch.int16) + _ZERO
    quads = channels.to(torch.uint8).reshape(len(channels), _PANEL, -1, _QUAD)
    return quads.transpose(1, 2).contiguous(), _blocks(scales, _PANEL).transpose(1, 2).contiguous()


def _blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """`rows` `[n, c]` as `[ceil(n / size), size, c]`, filled with rows of zeros."""
    return F.pad(rows, (0, 0, 0, -len(rows) % size)).reshape(-1, size, rows.shape[1])
