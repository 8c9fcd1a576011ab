"""Pack int8 weights in the order in which the compiled product reads them.

A panel holds 32 output channels (`kPanel` of panel.hpp) as quads of 4 input components (`kQuad` of linear_int8.hpp),
each byte a value + 128. Scales are ordered by panel, so that a panel's scales are contiguous.
"""

from __future__ import annotations

import torch

from tandem_kernels.native.pack import PANEL, features
from tandem_kernels.reference.linear_int8 import quantize_weight

_QUAD = 4
_ZERO = 128


def pack_linear_int8(weight: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and pack `weight` `[n, k]`.

    Returns panels uint8 `[ceil(n / 32), k / 4, 32, 4]` and scales float32 `[ceil(n / 32), k / group, 32]`. Channels
    beyond `n` are zero, and so are their scales. Raises ValueError as `quantize_weight` does.
    """
    values, scales = quantize_weight(weight, group)
    channels = features(values, PANEL).to(torch.int16) + _ZERO
    quads = channels.to(torch.uint8).reshape(len(channels), PANEL, -1, _QUAD)
    return quads.transpose(1, 2).contiguous(), features(scales, PANEL).transpose(1, 2).contiguous()


def unpack_int8(panels: torch.Tensor, n: int) -> torch.Tensor:
    """Unpack the panels of `pack_linear_int8` to int8 values `[n, k]`."""
    values = panels.transpose(1, 2).flatten(2).flatten(0, 1)[:n]
    return (values.to(torch.int16) - _ZERO).to(torch.int8)
