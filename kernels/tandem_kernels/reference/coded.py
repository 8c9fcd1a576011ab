"""Describe weights that a file stores in few bits: codes, and scales that groups of them share.

A weight is `step * (number(code) - offset) + base`, where step and base are those of its group. All parts have one row
per output feature, so rows can be selected, reordered and joined without decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from tandem_kernels.contract import FLOAT8, FLOAT8_GROUP, FLOAT8_MAX
from tandem_kernels.reference.linear_int8 import GROUP, fma, linear_int8, quantize_rows, quantize_weight

OUTER_GROUP = 256
"""Components of a row that share an outer scale, in formats with two levels of scales."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NAN_E4M3, _NAN_E8M0 = 0x7F, 0xFF
_FRACTION_BITS = 23
_INNER_ZERO = 128
_INT8_ZERO = 128
_CHUNK_ROWS = 4096


class NumberFormat(IntEnum):
    """Meaning of a code: an unsigned integer of some bits, or a float of four (e2m1) or eight (e4m3). The values are
    those of `Coding` of panel.hpp."""

    INT2 = 2
    INT3 = 3
    INT4 = 4
    INT5 = 5
    INT6 = 6
    INT8 = 7
    E2M1 = 8
    E4M3 = 9

    @property
    def bits(self) -> int:
        return {NumberFormat.INT8: 8, NumberFormat.E2M1: 4, NumberFormat.E4M3: 8}.get(self, int(self))


class ScaleFormat(IntEnum):
    """Storage of steps and bases. The values are those of `Scaling` of panel.hpp.

    Each format has these parts `[n, groups]`; an outer part has a column per `OUTER_GROUP` components.
    FLOAT: float32 steps. HALF: float16 steps. HALF_PAIRS: float16 steps and bases. HALF_ZEROS: float16 steps, uint8
    zeros; a base is `-zero * step`. INNER: uint8 factors + 128, float16 outer steps. INNER_PAIRS: uint8 factors of step
    and base, float16 outer steps and outer bases. NIBBLE_PAIRS: the same with both factors in one byte, the step's in
    the low four bits. POWER: uint8 exponents + 127 of powers of two. FLOAT8: e4m3 as uint8, and float32 divisors
    `[n, 1]`."""

    FLOAT = 0
    HALF = 1
    HALF_PAIRS = 2
    HALF_ZEROS = 3
    INNER = 4
    INNER_PAIRS = 5
    NIBBLE_PAIRS = 6
    POWER = 7
    FLOAT8 = 8


SCALES_OF: dict[NumberFormat, frozenset[ScaleFormat]] = {
    NumberFormat.INT2: frozenset({ScaleFormat.NIBBLE_PAIRS}),
    NumberFormat.INT3: frozenset({ScaleFormat.INNER}),
    NumberFormat.INT4: frozenset(
        {
            ScaleFormat.FLOAT,
            ScaleFormat.HALF,
            ScaleFormat.HALF_PAIRS,
            ScaleFormat.HALF_ZEROS,
            ScaleFormat.INNER_PAIRS,
        }
    ),
    NumberFormat.INT5: frozenset({ScaleFormat.HALF, ScaleFormat.HALF_PAIRS, ScaleFormat.INNER_PAIRS}),
    NumberFormat.INT6: frozenset({ScaleFormat.INNER}),
    NumberFormat.INT8: frozenset({ScaleFormat.FLOAT, ScaleFormat.HALF}),
    NumberFormat.E2M1: frozenset({ScaleFormat.POWER, ScaleFormat.FLOAT8}),
    NumberFormat.E4M3: frozenset({ScaleFormat.FLOAT, ScaleFormat.HALF}),
}
"""Formats of scales that files have with numbers of a format; equals `has_scaling` of coded.hpp, which has products of
these only."""

_WITH_OUTER = (ScaleFormat.INNER, ScaleFormat.INNER_PAIRS, ScaleFormat.NIBBLE_PAIRS)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of a matrix `[n, k]`. `group`: adjacent components of a row that share a step. `offset`: what is
    subtracted from each number, a power of two or 0."""

    format: ScaleFormat
    parts: tuple[torch.Tensor, ...]
    group: int
    offset: int = 0

    def affine(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return steps and bases as float32 `[n, k / group]`; None if all bases are zero."""
        first, *others = self.parts
        if self.format in (ScaleFormat.FLOAT, ScaleFormat.HALF):
            return first.float(), None
        if self.format is ScaleFormat.POWER:
            bits = (first.to(torch.int32) << _FRACTION_BITS).clamp(min=1 << (_FRACTION_BITS - 1))
            return bits.view(torch.float32), None
        if self.format is ScaleFormat.FLOAT8:
            return first.view(torch.float8_e4m3fn).float() / others[0], None
        if self.format is ScaleFormat.HALF_PAIRS:
            return first.float(), others[0].float()
        if self.format is ScaleFormat.HALF_ZEROS:
            return first.float(), -others[0].float() * first.float()
        repeats = OUTER_GROUP // self.group
        outer = [part.float().repeat_interleave(repeats, 1) for part in others if part.dtype == torch.float16]
        if self.format is ScaleFormat.INNER:
            return (first.float() - _INNER_ZERO) * outer[0], None
        low, high = (first, others[0]) if self.format is ScaleFormat.INNER_PAIRS else (first & 15, first >> 4)
        return low.float() * outer[0], -(high.float() * outer[1])


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A weight matrix `[n, k]` in few bits. `codes`: uint8 `[n, k]`, each below 2**bits of its format. k is a multiple
    of 32, and of 256 where scales have two levels. `is_finite`: all numbers and scales are known to be finite, as those
    of a part of another matrix are; otherwise this is checked. Raises ValueError."""

    numbers: NumberFormat
    codes: torch.Tensor
    scales: Scales
    is_finite: bool = False

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        group, formats = self.scales.group, self.scales.format
        if formats not in SCALES_OF[self.numbers]:
            raise ValueError(f"{self.numbers.name} codes with {formats.name} scales")
        if k % GROUP or k % group or (formats in _WITH_OUTER and k % OUTER_GROUP):
            raise ValueError(f"rows of {k} components, which are no whole groups")
        if any(len(part) != n for part in self.scales.parts) or self.scales.parts[0].shape[1] != k // group:
            raise ValueError(f"scales of shape {list(self.scales.parts[0].shape)} for a matrix of {[n, k]}")
        if not self.is_finite:
            self._require_finite()

    def _require_finite(self) -> None:
        require_finite(self.numbers, self.codes)
        formats = self.scales.format
        for part in self.scales.parts:
            if formats is ScaleFormat.POWER and bool((part == _NAN_E8M0).any()):
                raise ValueError("scales that are not finite numbers")
            is_e4m3 = formats is ScaleFormat.FLOAT8 and part.dtype == torch.uint8
            if not bool((part.view(torch.float8_e4m3fn).float() if is_e4m3 else part).isfinite().all()):
                raise ValueError("scales that are not finite numbers")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, index: torch.Tensor | slice) -> CodedMatrix:
        """Return the matrix of the rows that `index` selects."""
        parts = tuple(part[index] for part in self.scales.parts)
        return CodedMatrix(self.numbers, self.codes[index], replace(self.scales, parts=parts), is_finite=True)

    def columns(self, part: range) -> CodedMatrix | None:
        """Return the matrix of adjacent columns, in memory of its own. Scales that groups of one level share are
        repeated where the part begins or ends inside a group; None where that is not possible."""
        k, scales = self.shape[1], self.scales
        group = len(part) if scales.group == k else math.gcd(scales.group, part.start, part.stop)
        has_whole_outer = scales.format not in _WITH_OUTER or (part.start % OUTER_GROUP == 0 == part.stop % OUTER_GROUP)
        if len(part) % GROUP or (group != GROUP // 2 and group % GROUP) or not has_whole_outer:
            return None
        parts = tuple(_columns_of(each, part, k) for each in scales.parts)
        codes = self.codes[:, part.start : part.stop].contiguous()
        return CodedMatrix(self.numbers, codes, replace(scales, parts=parts, group=group), is_finite=True)

    def copy(self) -> CodedMatrix:
        """Return the same matrix in memory of its own, so that a matrix of which it is a part can be freed."""
        scales = replace(self.scales, parts=tuple(part.clone() for part in self.scales.parts))
        return CodedMatrix(self.numbers, self.codes.clone(), scales, is_finite=True)

    def floats(self) -> torch.Tensor:
        """Return the weights as float32 `[n, k]`, each rounded at most once."""
        out = torch.empty(self.codes.shape)
        for begin in range(0, len(out), _CHUNK_ROWS):
            self.rows(slice(begin, begin + _CHUNK_ROWS))._decode(out[begin : begin + _CHUNK_ROWS])
        return out

    def _decode(self, out: torch.Tensor) -> None:
        if self.numbers is NumberFormat.E4M3:
            numbers = self.codes.view(torch.float8_e4m3fn).float()
        elif self.numbers is NumberFormat.E2M1:
            numbers = torch.tensor(_E2M1)[self.codes.to(torch.int64)]
        else:
            numbers = self.codes.float() - self.scales.offset
        step, base = self.scales.affine()
        grouped = numbers.view(*step.shape, self.scales.group)
        # Where there is a base the product has at most 24 bits, so that only the addition rounds.
        values = grouped * step[..., None] if base is None else grouped * step[..., None] + base[..., None]
        out.copy_(values.flatten(1))


def _columns_of(scales: torch.Tensor, part: range, k: int) -> torch.Tensor:
    """Return the scales of adjacent columns of k, repeated if the part begins or ends inside a group; those of whole
    rows stay."""
    count = scales.shape[1]
    if count == 1:
        return scales.clone()
    size = math.gcd(k // count, part.start, part.stop)
    return scales.repeat_interleave(k // count // size, 1)[:, part.start // size : part.stop // size].contiguous()


def restore(matrix: CodedMatrix, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the floats of a matrix, rounded to `dtype`, on a device."""
    out = torch.empty(matrix.shape, dtype=dtype, device=device)
    for begin in range(0, len(out), _CHUNK_ROWS):
        rows = slice(begin, begin + _CHUNK_ROWS)
        out[rows] = matrix.rows(rows).floats().to(device)
    return out


def require_finite(numbers: NumberFormat, codes: torch.Tensor) -> None:
    """Raise ValueError when a code is no number."""
    if numbers is NumberFormat.E4M3 and bool(((codes & _NAN_E4M3) == _NAN_E4M3).any()):
        raise ValueError("numbers that are not finite")


def split_last(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a tensor with its last dimension split into dimensions of these sizes, of which one may be -1."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def join(matrices: Sequence[CodedMatrix]) -> CodedMatrix | None:
    """Return matrices of one width below each other as one; None if their formats differ."""
    first = matrices[0]
    if any(_kind(matrix) != _kind(first) for matrix in matrices[1:]):
        return None
    parts = tuple(torch.cat(parts) for parts in zip(*(m.scales.parts for m in matrices), strict=True))
    codes = torch.cat([matrix.codes for matrix in matrices])
    return CodedMatrix(first.numbers, codes, replace(first.scales, parts=parts), is_finite=True)


def _kind(matrix: CodedMatrix) -> tuple[object, ...]:
    scales = matrix.scales
    return matrix.numbers, scales.format, scales.group, scales.offset, [part.dtype for part in scales.parts]


def round_to_int8(weight: torch.Tensor, group: int | None = None) -> CodedMatrix:
    """Return float `weight` `[n, k]` rounded to int8 with a scale per `group` components, see `quantize_weight`."""
    values, scales = quantize_weight(weight, group)
    codes = (values.to(torch.int16) + _INT8_ZERO).to(torch.uint8)
    parts = Scales(ScaleFormat.FLOAT, (scales,), group or weight.shape[1], _INT8_ZERO)
    return CodedMatrix(NumberFormat.INT8, codes, parts)


def round_to_float8(weight: torch.Tensor) -> CodedMatrix:
    """Return float `weight` `[n, k]` rounded to float8 with a float32 scale per 128 components of a row, or per row if
    k is no multiple of them: `max |w| / 448`, or 1 where that is 0 or subnormal."""
    n, k = weight.shape
    group = FLOAT8_GROUP if k % FLOAT8_GROUP == 0 else k
    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((n, k // group), device=weight.device)
    # In parts, because temporary tensors take several times the memory of the weight.
    for begin in range(0, n, _CHUNK_ROWS):
        rows = slice(begin, begin + _CHUNK_ROWS)
        wide = weight[rows].to(torch.float32).view(-1, k // group, group)
        steps = wide.abs().amax(-1) / FLOAT8_MAX
        scales[rows] = torch.where(steps < torch.finfo(torch.float32).tiny, 1.0, steps)
        numbers = (wide / scales[rows][..., None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        codes[rows] = numbers.view(torch.uint8).view(-1, k)
    return CodedMatrix(NumberFormat.E4M3, codes, Scales(ScaleFormat.FLOAT, (scales,), group))


def has_integer_product(matrix: CodedMatrix) -> bool:
    """Return whether `linear_codes` is defined for a matrix: integers of 2, 3 or 6 bits in groups of 16, as GGUF has
    them, and others in groups of a multiple of 32."""
    if matrix.numbers > NumberFormat.INT8:
        return False
    has_halves = matrix.numbers in (NumberFormat.INT2, NumberFormat.INT3, NumberFormat.INT6)
    return matrix.scales.group == GROUP // 2 if has_halves else matrix.scales.group % GROUP == 0


def linear_codes(x: torch.Tensor, weight: CodedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply float32 rows `x`, quantised as in `linear_int8`, with coded weights that have an integer product.

    Weights of eight bits are multiplied by `linear_int8`. With others, rows are summed in groups g of 32 in ascending
    order: `total = fma(row_scale, value, total)` from zero, then the bias is added, all in float32. `value` is the sum
    over the one or two weight groups of g of `fma(step, dot(x, code - offset), base * sum(x))`."""
    scales = weight.scales
    if weight.numbers is NumberFormat.INT8:
        values = (weight.codes.to(torch.int16) - _INT8_ZERO).to(torch.int8)
        return linear_int8(x, values, scales.affine()[0], bias)
    rows, row_scales = quantize_rows(x)
    step, base = scales.affine()
    total = torch.zeros((len(x), len(weight.codes)))
    size = min(GROUP, scales.group)
    for g in range(row_scales.shape[1]):
        value = torch.zeros_like(total)
        for begin in range(g * GROUP, (g + 1) * GROUP, size):
            part, group = slice(begin, begin + size), begin // scales.group
            row = rows[:, part].float()
            # Integers below 2**24 are exact in float32 in any order; `base * sum` is rounded once.
            dots = row @ (weight.codes[:, part].float() - scales.offset).T
            of_base = torch.zeros_like(total) if base is None else base[:, group] * row.sum(dim=1, keepdim=True)
            value = value + fma(step[:, group], dots, of_base)
        total = fma(row_scales[:, g, None], value, total)
    return total if bias is None else total + bias
