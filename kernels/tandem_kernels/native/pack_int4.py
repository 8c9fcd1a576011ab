"""Pack float32 weights losslessly in fewer bits.

Checkpoints in bfloat16 and files of 4-bit and 8-bit blocks hold few distinct values when read as 32-bit floats.
coded.hpp describes the memory layout of each format.
"""

from __future__ import annotations

import torch

from tandem_kernels.native.pack import PANEL, features, pack_linear
from tandem_kernels.native.pack_int8 import pack_linear_int8, unpack_int8
from tandem_kernels.reference.int4 import Codes, find_codes
from tandem_kernels.reference.linear_int8 import GROUP

_SHIFTS = (0, 8, 16, 24, 4, 12, 20, 28)
"""Bit offsets of the eight codes in a word; equal to `four_shift` of coded.hpp."""


def pack_exact(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pack float32 `weight` `[n, k]` in the fewest bits that represent it exactly; returns panels and scales, if any.

    Panels are uint8 `[ceil(n / 32), k / 32, 640]` for 4-bit codes, those of `pack_linear_int8` with groups of 32 for 8
    bits, bfloat16 `[ceil(n / 32), k, 32]`, or those of `pack_linear` for float32.
    """
    fours = pack_fours(weight)
    if fours is not None:
        return fours, None
    eights = _pack_eights(weight)
    if eights is not None:
        return eights
    halves = weight.to(torch.bfloat16)
    return pack_linear(halves if torch.equal(halves.float(), weight) else weight), None


def pack_fours(weight: torch.Tensor) -> torch.Tensor | None:
    """Pack `weight` as records of 4-bit codes, as `pack_exact` does; None if codes cannot represent it exactly."""
    found = find_codes(weight)
    return None if found is None else _records(found)


def _records(weight: Codes) -> torch.Tensor:
    """Pack codes, steps and bases into records, uint8 `[ceil(n / 32), k / 32, 640]`."""
    n, num_groups = weight.step.shape
    codes = weight.codes.view(n, num_groups, GROUP).to(torch.int64)
    words = torch.zeros((n, num_groups, GROUP // len(_SHIFTS)), dtype=torch.int64)
    for j, shift in enumerate(_SHIFTS):
        words |= codes[..., j :: len(_SHIFTS)] << shift
    # Words from 2**31 on wrap to negative int32 numbers with the same bits, as intended.
    parts = (words.to(torch.int32), weight.step[..., None], weight.base[..., None])
    bytes_of_parts = [_panels(part.contiguous()).view(torch.uint8).flatten(2) for part in parts]
    return torch.cat(bytes_of_parts, dim=2)


def _panels(part: torch.Tensor) -> torch.Tensor:
    """Reorder `part` `[n, groups, c]` to `[ceil(n / 32), groups, c, 32]`."""
    n, num_groups, width = part.shape
    rows = features(part.view(n, -1), PANEL).view(-1, PANEL, num_groups, width)
    return rows.permute(0, 2, 3, 1).contiguous()


def _pack_eights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Pack `weight` as int8 values and scales in groups of 32; None if they cannot represent it exactly."""
    n, k = weight.shape
    if k % GROUP or not weight.isfinite().all():
        return None
    panels, scales = pack_linear_int8(weight, GROUP)
    per_row = scales.transpose(1, 2).flatten(0, 1)[:n, :, None]
    values = unpack_int8(panels, n).view(n, -1, GROUP)
    return (panels, scales) if torch.equal((values * per_row).view(n, k), weight) else None
