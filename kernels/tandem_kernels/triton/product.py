"""Multiply, inside a kernel, a tile of rows with a tile of a weight: floats, codes that are restored to floats, or both
in float8.

A restored weight is `step * (number - offset) + base` in float32, rounded once and then to the type of the rows, as
`CodedMatrix.floats` rounds: products have the same operands as with the restored matrix, which is never in memory.
Conversions of numbers to floats shift bits and multiply by a power of two, so that GPUs without the types can do them.

Float8 weights that round their rows are multiplied with rows rounded to float8 in groups of `FLOAT8_GROUP`; the sum
over a group is multiplied by the two scales and added in float32. On Hopper tiles of at least 64 rows use the tensor
cores' products of float8; others widen both to float16, which is exact.

A kernel takes rows and a weight as the fields of `ProductArguments`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.contract import FLOAT8_GROUP, FLOAT8_MAX
from tandem_kernels.device_codes import DeviceCodes, has_nibbles
from tandem_kernels.reference.coded import OUTER_GROUP, NumberFormat, ScaleFormat
from tandem_kernels.triton.attention_tile import operand
from tandem_kernels.triton.interpret import INTERPRETED, UNFUSED, float8_bits, narrow

FLOATS = tl.constexpr(0)
"""Stands for the numbers of a weight that is not coded."""
# Places in `ProductArguments.form`.
NUMBERS, SCALING, GROUP, OFFSET, PER_BYTE, ROUNDS = (tl.constexpr(place) for place in range(6))
_E2M1, _E4M3 = tl.constexpr(int(NumberFormat.E2M1)), tl.constexpr(int(NumberFormat.E4M3))
_HALF_PAIRS, _HALF_ZEROS = tl.constexpr(int(ScaleFormat.HALF_PAIRS)), tl.constexpr(int(ScaleFormat.HALF_ZEROS))
_INNER, _INNER_PAIRS = tl.constexpr(int(ScaleFormat.INNER)), tl.constexpr(int(ScaleFormat.INNER_PAIRS))
_NIBBLE_PAIRS, _POWER = tl.constexpr(int(ScaleFormat.NIBBLE_PAIRS)), tl.constexpr(int(ScaleFormat.POWER))
_FLOAT8 = tl.constexpr(int(ScaleFormat.FLOAT8))
_OUTER = tl.constexpr(OUTER_GROUP)
_LARGEST, _TINY = tl.constexpr(FLOAT8_MAX), tl.constexpr(torch.finfo(torch.float32).tiny)


class ProductArguments(NamedTuple):
    """How a kernel takes rows and a weight. `rows`: floats, or codes of float8 with their scales `row_scales`. `data`,
    `scales`: floats or codes of the weight, and the parts of its scales. `form` has at NUMBERS the weight's numbers or
    FLOATS, at SCALING, GROUP and OFFSET the format, group and offset of its scales, at PER_BYTE the codes of a byte,
    and at ROUNDS whether rows are codes."""

    rows: torch.Tensor
    row_scales: torch.Tensor | None
    data: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    form: tuple[int, int, int, int, int, bool]


def arguments_of(rows: torch.Tensor, weight: torch.Tensor | DeviceCodes) -> ProductArguments:
    """Return contiguous rows and a weight as a kernel takes them."""
    if isinstance(weight, torch.Tensor):
        return ProductArguments(rows, None, weight, (), (FLOATS.value, 0, weight.shape[-1], 0, 1, False))
    scales, per_byte = weight.scales, 2 if has_nibbles(weight.numbers) else 1
    form = (int(weight.numbers), int(scales.format), scales.group, scales.offset, per_byte, weight.rounds_rows)
    codes, row_scales = round_rows(rows) if weight.rounds_rows else (rows, None)
    return ProductArguments(codes, row_scales, weight.data, scales.parts, form)


def inputs_per_tile(weight: torch.Tensor | DeviceCodes, most: int) -> int:
    """Return the inputs that a tile has: `FLOAT8_GROUP` where rows are rounded, else at most `most`, whole groups of
    scales or part of one."""
    if isinstance(weight, torch.Tensor):
        return most
    if weight.rounds_rows:
        return FLOAT8_GROUP
    group = weight.scales.group
    is_whole = group == weight.shape[-1] or group % most == 0 or most % group == 0
    return most if is_whole else min(most, group & -group)


@triton.jit
def _round_kernel(p_codes, p_scales, p_x, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    GROUPS: tl.constexpr = tl.cdiv(WIDTH, GROUP)
    i_row, i_group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_x = i_group * GROUP + tl.arange(0, GROUP)
    b_x = tl.load(p_x + i_row * WIDTH + o_x, mask=o_x < WIDTH, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(b_x), 0), _LARGEST)
    scale = tl.where(scale < _TINY, 1.0, scale)
    codes = float8_bits(tl.div_rn(b_x, tl.broadcast_to(scale, [GROUP])))
    tl.store(p_codes + i_row * WIDTH + o_x, codes, mask=o_x < WIDTH)
    tl.store(p_scales + i_row * GROUPS + i_group, scale)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round contiguous rows `[T, k]` to float8 e4m3. Returns codes, uint8 `[T, k]`, and float32 scales
    `[T, ceil(k / FLOAT8_GROUP)]`: `max |x| / 448` of a group, or 1 where that is 0 or subnormal."""
    num_rows, width = x.shape
    num_groups = triton.cdiv(width, FLOAT8_GROUP)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    if num_rows:
        _round_kernel[(num_rows, num_groups)](codes, scales, x, WIDTH=width, GROUP=FLOAT8_GROUP, num_warps=1, **UNFUSED)
    return codes, scales


@triton.jit
def _float8_number(codes):
    """Convert the bits of float8 e4m3 to float32. Subnormal numbers become normal in the product."""
    bits = (codes & 0x80) << 24 | (codes & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _numbers(codes, FORM: tl.constexpr):
    """Convert codes, uint32, to the numbers that they mean, less the offset."""
    if FORM[NUMBERS] == _E4M3:
        numbers = _float8_number(codes)
    elif FORM[NUMBERS] == _E2M1:
        bits = (codes & 8) << 28 | (codes & 7) << 22
        numbers = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    else:
        numbers = (codes.to(tl.int32) - FORM[OFFSET]).to(tl.float32)
    return numbers


@triton.jit
def _load_part(p_part, o_rows, columns, mask, COLUMNS: tl.constexpr):
    return tl.load(p_part + o_rows[:, None] * COLUMNS + columns[None, :], mask=mask, other=0)


@triton.jit
def _affine(scales, o_rows, m_rows, first, GROUPS: tl.constexpr, FORM: tl.constexpr, INPUTS: tl.constexpr):
    """Load steps and bases, float32 `[rows, GROUPS]`, of the groups from `first` on."""
    SCALES: tl.constexpr = FORM[SCALING]
    COLUMNS: tl.constexpr = INPUTS // FORM[GROUP]
    columns = first + tl.arange(0, GROUPS)
    mask = m_rows[:, None] & (columns < COLUMNS)[None, :]
    part = _load_part(scales[0], o_rows, columns, mask, COLUMNS)
    base = tl.zeros([o_rows.shape[0], GROUPS], tl.float32)
    if SCALES == _POWER:
        bits = tl.maximum(part.to(tl.uint32) << 23, 1 << 22)
        step = bits.to(tl.float32, bitcast=True)
    elif SCALES == _FLOAT8:
        divisors = tl.load(scales[1] + o_rows, mask=m_rows, other=1.0)
        step = tl.div_rn(_float8_number(part.to(tl.uint32)), tl.broadcast_to(divisors[:, None], part.shape))
    elif SCALES == _HALF_PAIRS:
        step = part.to(tl.float32)
        base = _load_part(scales[1], o_rows, columns, mask, COLUMNS).to(tl.float32)
    elif SCALES == _HALF_ZEROS:
        step = part.to(tl.float32)
        base = -_load_part(scales[1], o_rows, columns, mask, COLUMNS).to(tl.float32) * step
    elif part.dtype.is_floating():
        step = part.to(tl.float32)
    else:
        outer_columns = columns // (_OUTER // FORM[GROUP])
        OUTER_COLUMNS: tl.constexpr = INPUTS // _OUTER
        NEXT: tl.constexpr = 2 if SCALES == _INNER_PAIRS else 1
        outer = _load_part(scales[NEXT], o_rows, outer_columns, mask, OUTER_COLUMNS).to(tl.float32)
        if SCALES == _INNER:
            step = (part.to(tl.float32) - 128.0) * outer
        else:
            low, high = part & 15, part >> 4
            if SCALES == _INNER_PAIRS:
                low, high = part, _load_part(scales[1], o_rows, columns, mask, COLUMNS)
            step = low.to(tl.float32) * outer
            outer = _load_part(scales[NEXT + 1], o_rows, outer_columns, mask, OUTER_COLUMNS).to(tl.float32)
            base = -(high.to(tl.float32) * outer)
    return step, base


@triton.jit
def _float8_operand(codes):
    """Return the bits of float8 numbers as an operand of `dot`: the interpreter has no product of float8."""
    return _float8_number(codes.to(tl.uint32)) if INTERPRETED else codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _load_tile(p_matrix, o_rows, m_rows, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load `[rows, BLOCK]` of a matrix of rows of WIDTH, zeros where masked, which are not read."""
    o_columns = tl.arange(0, BLOCK)
    mask = m_rows[:, None] & (start + o_columns < WIDTH)[None, :]
    # Offsets do not depend on `start`, so that a loop over it computes them once.
    return tl.load(p_matrix + start + (o_rows[:, None] * WIDTH + o_columns[None, :]), mask=mask, other=0)


@triton.jit
def _restored(p_weight, scales, o_rows, m_rows, start, FORM: tl.constexpr, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load codes and return their weights, float32 `[BLOCK_N, BLOCK_K]`, finite numbers where masked."""
    SHARE: tl.constexpr = FORM[PER_BYTE]
    codes = _load_tile(p_weight, o_rows, m_rows, start // SHARE, INPUTS // SHARE, BLOCK_K // SHARE).to(tl.uint32)
    if SHARE == 2:
        codes = tl.interleave(codes & 15, codes >> 4)
    numbers = _numbers(codes, FORM)
    SIZE: tl.constexpr = FORM[GROUP]
    GROUPS: tl.constexpr = BLOCK_K // SIZE if SIZE < BLOCK_K and SIZE < INPUTS else 1
    step, base = _affine(scales, o_rows, m_rows, start // SIZE, GROUPS, FORM, INPUTS)
    grouped = numbers.reshape([o_rows.shape[0], GROUPS, BLOCK_K // GROUPS])
    return (grouped * step[:, :, None] + base[:, :, None]).reshape([o_rows.shape[0], BLOCK_K])


@triton.jit
def row_tile(
    p_rows,
    p_row_scales,
    o_rows,  # int64 [BLOCK_M]
    m_rows,
    start,  # first input, a multiple of BLOCK_K
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load rows `[BLOCK_M, BLOCK_K]` as an operand of `dot`, zeros where masked, and their scales, float32 `[BLOCK_M]`,
    ones where rows are not rounded."""
    b_rows = _load_tile(p_rows, o_rows, m_rows, start, INPUTS, BLOCK_K)
    b_scales = tl.full([o_rows.shape[0]], 1.0, tl.float32)
    if FORM[ROUNDS]:
        o_scales = o_rows * tl.cdiv(INPUTS, BLOCK_K) + start // BLOCK_K
        b_scales = tl.load(p_row_scales + o_scales, mask=m_rows, other=1.0)
        b_rows = _float8_operand(b_rows)
    else:
        b_rows = operand(b_rows)
    return b_rows, b_scales


@triton.jit
def add_product(
    b_acc,  # float32 [BLOCK_M, BLOCK_N]
    b_rows,
    b_row_scales,
    p_weight,
    scales,
    o_rows,  # int64 [BLOCK_N], rows of the weight
    m_rows,
    start,  # first input, a multiple of BLOCK_K
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add the product of what `row_tile` returned with a tile of a weight. DTYPE: type of rows that are not rounded."""
    if FORM[ROUNDS]:
        codes = _load_tile(p_weight, o_rows, m_rows, start, INPUTS, BLOCK_K)
        step, _ = _affine(scales, o_rows, m_rows, start // FORM[GROUP], 1, FORM, INPUTS)
        product = tl.dot(b_rows, tl.trans(_float8_operand(codes)))
        b_acc += product * (b_row_scales[:, None] * tl.trans(step))
    else:
        if FORM[NUMBERS] == FLOATS:
            b_weight = operand(_load_tile(p_weight, o_rows, m_rows, start, INPUTS, BLOCK_K))
        else:
            b_weight = _restored(p_weight, scales, o_rows, m_rows, start, FORM, INPUTS, BLOCK_K)
            b_weight = operand(narrow(b_weight, DTYPE))
        # "ieee": no TF32 for float32.
        b_acc = tl.dot(b_rows, tl.trans(b_weight), b_acc, input_precision="ieee")
    return b_acc
