"""Load, inside a kernel, a tile of a weight matrix: floats as they are, or codes restored to floats.

A restored weight is `step * (number - offset) + base` in float32, rounded once and then to the type of the rows, as
`CodedMatrix.floats` rounds: products have the same operands as with the restored matrix, which is never in memory.
Conversions of numbers to floats shift bits and multiply by a power of two, so that GPUs without the types can do them.

A kernel takes a weight as the three fields of `WeightArguments`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.device_codes import DeviceCodes, has_nibbles
from tandem_kernels.reference.coded import OUTER_GROUP, NumberFormat, ScaleFormat
from tandem_kernels.triton.attention_tile import operand
from tandem_kernels.triton.interpret import narrow

FLOATS = 0
"""Stands for the numbers of a weight that is not coded."""
_E2M1, _E4M3 = tl.constexpr(int(NumberFormat.E2M1)), tl.constexpr(int(NumberFormat.E4M3))
_HALF_PAIRS, _HALF_ZEROS = tl.constexpr(int(ScaleFormat.HALF_PAIRS)), tl.constexpr(int(ScaleFormat.HALF_ZEROS))
_INNER, _INNER_PAIRS = tl.constexpr(int(ScaleFormat.INNER)), tl.constexpr(int(ScaleFormat.INNER_PAIRS))
_NIBBLE_PAIRS, _POWER = tl.constexpr(int(ScaleFormat.NIBBLE_PAIRS)), tl.constexpr(int(ScaleFormat.POWER))
_FLOAT8 = tl.constexpr(int(ScaleFormat.FLOAT8))
_OUTER = tl.constexpr(OUTER_GROUP)


class WeightArguments(NamedTuple):
    """How a kernel takes a weight. `scales`: the parts of its scales. `form`: its numbers, FLOATS if it is not coded,
    the format of its scales, their group and offset, and the codes of a byte."""

    data: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    form: tuple[int, int, int, int, int]


def arguments_of(weight: torch.Tensor | DeviceCodes) -> WeightArguments:
    """Return a weight as a kernel takes it."""
    if isinstance(weight, torch.Tensor):
        return WeightArguments(weight, (), (FLOATS, 0, weight.shape[-1], 0, 1))
    scales, per_byte = weight.scales, 2 if has_nibbles(weight.numbers) else 1
    form = (int(weight.numbers), int(scales.format), scales.group, scales.offset, per_byte)
    return WeightArguments(weight.data, scales.parts, form)


def inputs_per_tile(weight: torch.Tensor | DeviceCodes, most: int) -> int:
    """Return the inputs that a tile has, at most `most`: whole groups of scales, or part of one."""
    width = weight.shape[-1]
    group = width if isinstance(weight, torch.Tensor) else weight.scales.group
    is_whole = group == width or group % most == 0 or most % group == 0
    return most if is_whole else min(most, group & -group)


@triton.jit
def _float8_number(codes):
    """Convert the bits of float8 e4m3 to float32. Subnormal numbers become normal in the product."""
    bits = (codes & 0x80) << 24 | (codes & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _numbers(codes, NUMBERS: tl.constexpr, OFFSET: tl.constexpr):
    """Convert codes, uint32, to the numbers that they mean, less the offset."""
    if NUMBERS == _E4M3:
        numbers = _float8_number(codes)
    elif NUMBERS == _E2M1:
        bits = (codes & 8) << 28 | (codes & 7) << 22
        numbers = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    else:
        numbers = (codes.to(tl.int32) - OFFSET).to(tl.float32)
    return numbers


@triton.jit
def _load_part(p_part, o_rows, columns, mask, COLUMNS: tl.constexpr):
    return tl.load(p_part + o_rows[:, None] * COLUMNS + columns[None, :], mask=mask, other=0)


@triton.jit
def _affine(scales, o_rows, m_rows, first, GROUPS: tl.constexpr, FORM: tl.constexpr, INPUTS: tl.constexpr):
    """Load steps and bases, float32 `[rows, GROUPS]`, of the groups from `first` on."""
    SCALING: tl.constexpr = FORM[1]
    COLUMNS: tl.constexpr = INPUTS // FORM[2]
    columns = first + tl.arange(0, GROUPS)
    mask = m_rows[:, None] & (columns < COLUMNS)[None, :]
    part = _load_part(scales[0], o_rows, columns, mask, COLUMNS)
    base = tl.zeros([o_rows.shape[0], GROUPS], tl.float32)
    if SCALING == _POWER:
        bits = tl.maximum(part.to(tl.uint32) << 23, 1 << 22)
        step = bits.to(tl.float32, bitcast=True)
    elif SCALING == _FLOAT8:
        divisors = tl.load(scales[1] + o_rows, mask=m_rows, other=1.0)
        step = tl.div_rn(_float8_number(part.to(tl.uint32)), tl.broadcast_to(divisors[:, None], part.shape))
    elif SCALING == _HALF_PAIRS:
        step = part.to(tl.float32)
        base = _load_part(scales[1], o_rows, columns, mask, COLUMNS).to(tl.float32)
    elif SCALING == _HALF_ZEROS:
        step = part.to(tl.float32)
        base = -_load_part(scales[1], o_rows, columns, mask, COLUMNS).to(tl.float32) * step
    elif part.dtype.is_floating():
        step = part.to(tl.float32)
    else:
        outer_columns = columns // (_OUTER // FORM[2])
        OUTER_COLUMNS: tl.constexpr = INPUTS // _OUTER
        NEXT: tl.constexpr = 2 if SCALING == _INNER_PAIRS else 1
        outer = _load_part(scales[NEXT], o_rows, outer_columns, mask, OUTER_COLUMNS).to(tl.float32)
        if SCALING == _INNER:
            step = (part.to(tl.float32) - 128.0) * outer
        else:
            low, high = part & 15, part >> 4
            if SCALING == _INNER_PAIRS:
                low, high = part, _load_part(scales[1], o_rows, columns, mask, COLUMNS)
            step = low.to(tl.float32) * outer
            outer = _load_part(scales[NEXT + 1], o_rows, outer_columns, mask, OUTER_COLUMNS).to(tl.float32)
            base = -(high.to(tl.float32) * outer)
    return step, base


@triton.jit
def weight_tile(
    p_weight,
    scales,
    o_rows,  # int64 [BLOCK_N]
    m_rows,
    start,  # first input, a multiple of BLOCK_K
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load weights `[BLOCK_N, BLOCK_K]` as an operand of `dot` with rows of DTYPE. What is masked is a finite number,
    zero if the weight is not coded; masked inputs have to be zeros in the rows."""
    if FORM[0] == 0:
        o_inputs = start + tl.arange(0, BLOCK_K)
        mask = m_rows[:, None] & (o_inputs < INPUTS)[None, :]
        weights = operand(tl.load(p_weight + o_rows[:, None] * INPUTS + o_inputs[None, :], mask=mask, other=0.0))
    else:
        PER_BYTE: tl.constexpr = FORM[4]
        o_bytes = start // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
        mask = m_rows[:, None] & (o_bytes < INPUTS // PER_BYTE)[None, :]
        packed = tl.load(p_weight + o_rows[:, None] * (INPUTS // PER_BYTE) + o_bytes[None, :], mask=mask, other=0)
        codes = packed.to(tl.uint32)
        if PER_BYTE == 2:
            codes = tl.interleave(codes & 15, codes >> 4)
        numbers = _numbers(codes, FORM[0], FORM[3])
        GROUP: tl.constexpr = FORM[2]
        GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K and GROUP < INPUTS else 1
        step, base = _affine(scales, o_rows, m_rows, start // GROUP, GROUPS, FORM, INPUTS)
        grouped = numbers.reshape([o_rows.shape[0], GROUPS, BLOCK_K // GROUPS])
        weights = (grouped * step[:, :, None] + base[:, :, None]).reshape([o_rows.shape[0], BLOCK_K])
        weights = operand(narrow(weights, DTYPE))
    return weights
