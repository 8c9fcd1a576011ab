"""Pack weight matrices in the fewest bits that hold them exactly, in the order in which compiled products read them.

coded.hpp describes the memory layout of codes, panel.hpp that of scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.native.pack import PANEL, features, pack_linear
from tandem_kernels.reference.coded import CodedMatrix, NumberFormat, split_last
from tandem_kernels.reference.linear_int8 import GROUP

_CHUNK_PANELS = 128


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """Format of packed codes. `numbers`, `scales`: values of `NumberFormat` and `ScaleFormat`."""

    numbers: int
    scales: int
    group: int
    offset: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed weight matrix. `panels`: weights in panels of 32 output features, float32 or bfloat16 `[panels, k, 32]`,
    or codes as uint8 if there is a `format`. `scales`: the parts of the scales, `[panels, columns, 32]` each."""

    panels: torch.Tensor
    scales: tuple[torch.Tensor, ...] = ()
    format: CodeFormat | None = None


def pack_exact(weight: torch.Tensor | CodedMatrix) -> PackedMatrix:
    """Pack `weight` `[n, k]`: codes as they are, floats as bfloat16 where that holds them exactly, else as float32."""
    if isinstance(weight, CodedMatrix):
        return pack_coded(weight)
    halves = weight.to(torch.bfloat16)
    return PackedMatrix(pack_linear(halves if torch.equal(halves.float(), weight) else weight))


def pack_coded(weight: CodedMatrix) -> PackedMatrix:
    """Pack the codes of `weight` as uint8 `[ceil(n / 32), k / 32, bytes of 32 x 32 codes]`."""
    n, k = weight.shape
    panels = torch.empty((-(-n // PANEL), k // GROUP, PANEL * GROUP * weight.numbers.bits // 8), dtype=torch.uint8)
    for first in range(0, len(panels), _CHUNK_PANELS):
        part = weight.codes[first * PANEL : (first + _CHUNK_PANELS) * PANEL]
        panels[first : first + _CHUNK_PANELS] = _pack_chunk(features(part, PANEL), weight.numbers)
    scales = weight.scales
    parts = tuple(features(part, PANEL).transpose(1, 2).contiguous() for part in scales.parts)
    return PackedMatrix(panels, parts, CodeFormat(weight.numbers, scales.format, scales.group, scales.offset))


def _pack_chunk(codes: torch.Tensor, numbers: NumberFormat) -> torch.Tensor:
    """Pack codes `[panels, 32, k]` to bytes `[panels, k / 32, bytes]`."""
    blocks = split_last(codes, -1, GROUP)
    planes = [_PLANES[width]((blocks >> shift) & ((1 << width) - 1)) for width, shift in _SPLITS[numbers.bits]]
    # [panels, 32 columns, blocks, words, 4 bytes] to [panels, blocks, words, columns, bytes]
    return torch.cat([plane.permute(0, 2, 3, 1, 4).flatten(2) for plane in planes], dim=2)


def _plane_of_eights(codes: torch.Tensor) -> torch.Tensor:
    return split_last(codes, 8, 4)


def _plane_of_fours(codes: torch.Tensor) -> torch.Tensor:
    low, high = split_last(codes, 4, 2, 4).unbind(-2)
    return low | high << 4


def _plane_of_twos(codes: torch.Tensor) -> torch.Tensor:
    quads = split_last(codes, 2, 4, 4).unbind(-2)
    return quads[0] | quads[1] << 2 | quads[2] << 4 | quads[3] << 6


def _plane_of_ones(codes: torch.Tensor) -> torch.Tensor:
    quads = split_last(codes, 1, 8, 4).unbind(-2)
    out = quads[0].clone()
    for index in range(1, 8):
        out |= quads[index] << index
    return out


_PLANES = {8: _plane_of_eights, 4: _plane_of_fours, 2: _plane_of_twos, 1: _plane_of_ones}
"""By the bits of a plane, the function that packs codes `[..., 32]` of that many bits to words `[..., words, 4]`."""
_SPLITS = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
}
"""By the bits of a code, its planes as (bits, shift of these bits in the code)."""
