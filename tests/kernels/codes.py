"""Draws random weights in every format of codes; tests nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem_kernels.reference.coded import (
    OUTER_GROUP,
    CodedMatrix,
    NumberFormat,
    ScaleFormat,
    Scales,
    has_integer_product,
)


class _Source:
    """Random parts of scales of one matrix."""

    def __init__(self, n: int, k: int, seed: int) -> None:
        self.n, self.k = n, k
        self.generator = torch.Generator().manual_seed(seed)

    def codes(self, numbers: NumberFormat) -> torch.Tensor:
        found = torch.randint(0, 1 << numbers.bits, (self.n, self.k), generator=self.generator, dtype=torch.uint8)
        is_nan = (found & 0x7F) == 0x7F
        return torch.where(is_nan, found & 0x80, found) if numbers is NumberFormat.E4M3 else found

    def floats(self, group: int) -> torch.Tensor:
        return torch.rand((self.n, self.k // group), generator=self.generator) / 8 + 1e-3

    def halves(self, group: int) -> torch.Tensor:
        found = self.floats(group).half()
        found[0, 0] = 0
        found[-1, -1] = 3e-7
        return found

    def bytes(self, group: int, most: int = 256, least: int = 0) -> torch.Tensor:
        shape = (self.n, self.k // group)
        return torch.randint(least, most, shape, generator=self.generator, dtype=torch.uint8)


Parts = Callable[[_Source, int], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Format:
    """A format of codes. `group` 0: one scale per row."""

    numbers: NumberFormat
    scales: ScaleFormat
    group: int
    offset: int
    parts: Parts

    @property
    def multiple(self) -> int:
        """Return the number that a row's length is a multiple of."""
        has_outer = self.scales in (ScaleFormat.INNER, ScaleFormat.INNER_PAIRS, ScaleFormat.NIBBLE_PAIRS)
        return OUTER_GROUP if has_outer else max(32, self.group)

    @property
    def is_integer(self) -> bool:
        return has_integer_product(self.random(1, self.multiple))

    def random(self, n: int, k: int, seed: int = 4) -> CodedMatrix:
        """Return a random matrix, of rows that are lengthened to a multiple that the format can have."""
        k += -k % self.multiple
        source, group = _Source(n, k, seed), self.group or k
        scales = Scales(self.scales, self.parts(source, group), group, self.offset)
        return CodedMatrix(self.numbers, source.codes(self.numbers), scales)


def _half(source: _Source, group: int) -> tuple[torch.Tensor, ...]:
    return (source.halves(group),)


def _pairs(source: _Source, group: int) -> tuple[torch.Tensor, ...]:
    return source.halves(group), -7 * source.halves(group)


def _inner(source: _Source, group: int) -> tuple[torch.Tensor, ...]:
    return source.bytes(group), source.halves(OUTER_GROUP)


def _inner_pairs(source: _Source, group: int) -> tuple[torch.Tensor, ...]:
    return source.bytes(group, 64), source.bytes(group, 64), source.halves(OUTER_GROUP), source.halves(OUTER_GROUP)


def _nibbles(source: _Source, group: int) -> tuple[torch.Tensor, ...]:
    return source.bytes(group), source.halves(OUTER_GROUP), source.halves(OUTER_GROUP)


def _float8(source: _Source, group: int) -> tuple[torch.Tensor, ...]:
    return source.bytes(group, 0x7F), source.floats(source.k)


_N, _S = NumberFormat, ScaleFormat
FORMATS: dict[str, Format] = {
    "q4_0": Format(_N.INT4, _S.HALF, 32, 8, _half),
    "q4_1": Format(_N.INT4, _S.HALF_PAIRS, 32, 0, _pairs),
    "q5_0": Format(_N.INT5, _S.HALF, 32, 16, _half),
    "q5_1": Format(_N.INT5, _S.HALF_PAIRS, 32, 0, _pairs),
    "q8_0": Format(_N.INT8, _S.HALF, 32, 128, _half),
    "q2_k": Format(_N.INT2, _S.NIBBLE_PAIRS, 16, 0, _nibbles),
    "q3_k": Format(_N.INT3, _S.INNER, 16, 4, _inner),
    "q4_k": Format(_N.INT4, _S.INNER_PAIRS, 32, 0, _inner_pairs),
    "q5_k": Format(_N.INT5, _S.INNER_PAIRS, 32, 0, _inner_pairs),
    "q6_k": Format(_N.INT6, _S.INNER, 16, 32, _inner),
    "int8 of rows": Format(_N.INT8, _S.FLOAT, 0, 128, lambda source, group: (source.floats(group),)),
    "int8 of 96": Format(_N.INT8, _S.FLOAT, 96, 128, lambda source, group: (source.floats(group),)),
    "int4 of 64": Format(_N.INT4, _S.FLOAT, 64, 8, lambda source, group: (source.floats(group),)),
    "int4 with zeros": Format(_N.INT4, _S.HALF_ZEROS, 64, 0, lambda d, g: (d.halves(g), d.bytes(g, 17))),
    "mxfp4": Format(_N.E2M1, _S.POWER, 32, 0, lambda source, group: (source.bytes(group, 140, 90),)),
    "nvfp4": Format(_N.E2M1, _S.FLOAT8, 16, 0, _float8),
    "fp8 of 64": Format(_N.E4M3, _S.FLOAT, 64, 0, lambda source, group: (source.floats(group),)),
    "fp8 of halves": Format(_N.E4M3, _S.HALF, 64, 0, _half),
}
"""Formats of files by name."""
INTEGER_FORMATS = {name: format for name, format in FORMATS.items() if format.is_integer}


def randn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
