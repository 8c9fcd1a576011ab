"""Read matrices that a checkpoint stores in few bits.

A matrix is stored as codes (small integers, each standing for a number) and scales; a weight is computed in float32
from its number and the scale that a group of numbers shares. Each format says which tensors hold the codes and scales
of a matrix. Activations are never rounded, even if the checkpoint asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tandem_kernels.reference.coded import CodedMatrix, NumberFormat, ScaleFormat, Scales, require_finite, split_last
from tandem_kernels.reference.linear_int8 import GROUP

Parts = Mapping[str, torch.Tensor]
AnyMatrix = torch.Tensor | CodedMatrix
"""A matrix as floats or as codes."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each four bits of a 32-bit word of AWQ, lowest bits first: which of eight adjacent columns they hold."""
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
_INT8_ZERO, _INT4_ZERO = 128, 8
_LEAST_GROUP = 16
_MOST_FLOAT8_STEP = 128.0
"""Greatest scale of float8 numbers that the compiled kernels can multiply with."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Describe a format in which a checkpoint stores matrices, as one or more tensors per matrix.

    The tensors of a matrix have the names `base + suffix`, one for each of `suffixes`, where `base` is the name of the
    matrix without `.weight`.

    - `name`: name of the format, for error messages.
    - `suffixes`: suffixes of the tensors that every matrix in this format has. A matrix is in this format if the
      checkpoint has its tensor with the first of them.
    - `reader`, `parameters`: `read` calls `reader` with the parameters behind its own arguments.
    """

    name: str
    suffixes: tuple[str, ...]
    reader: Callable[..., AnyMatrix] = field(repr=False)
    parameters: tuple[Any, ...] = ()

    def read(self, parts: Parts, shape: tuple[int, int]) -> AnyMatrix:
        """Return the matrix that is stored in `parts`: as codes and scales (`CodedMatrix`), or as float32 if codes
        cannot represent it.

        `parts`: the tensors of the matrix, by suffix. `shape`: its numbers of rows and columns. Raises ValueError when
        a tensor does not fit the shape or has another dtype, or a scale is not finite."""
        return self.reader(parts, shape, *self.parameters)


def float8_format(name: str, scale: str, block: tuple[int, int] | None = None) -> StoredFormat:
    """Return the format of matrices with float8 elements (e4m3), which are multiplied by float scales.

    `name`: the format in error messages. `scale`: suffix of the tensor that holds a matrix's scales. `block`: numbers
    of rows and of columns of the blocks that have one scale each; None: a matrix has one scale per row, or a single
    one."""
    return StoredFormat(name, (scale, ".weight"), _read_float8, (scale, block))


def _read_float8(parts: Parts, shape: tuple[int, int], suffix: str, block: tuple[int, int] | None) -> AnyMatrix:
    numbers, scale = parts[".weight"], _finite(parts[suffix])
    _require(numbers, shape, torch.float8_e4m3fn)
    group = shape[1]
    if block is None:
        scale = _per_row(scale, shape)
    else:
        rows, columns = block
        _require(scale, (-(-shape[0] // rows), -(-shape[1] // columns)))
        group = math.gcd(shape[1], columns)
        scale = scale.repeat_interleave(rows, 0)[: shape[0]]
        scale = scale.repeat_interleave(columns // group, 1)[:, : shape[1] // group]
    require_finite(NumberFormat.E4M3, numbers.view(torch.uint8))
    if not _fits(shape[1], group) or bool((scale.abs() > _MOST_FLOAT8_STEP).any()):
        return numbers.to(torch.float32) * scale.repeat_interleave(group, 1)
    return CodedMatrix(NumberFormat.E4M3, numbers.view(torch.uint8), _steps(scale, group))


def _read_int8(parts: Parts, shape: tuple[int, int]) -> AnyMatrix:
    numbers, scale = parts[".weight"], _per_row(_finite(parts[".weight_scale"]), shape)
    _require(numbers, shape, torch.int8)
    if not _fits(shape[1], shape[1]):
        return numbers.to(torch.float32) * scale
    codes = (numbers.to(torch.int16) + _INT8_ZERO).to(torch.uint8)
    return CodedMatrix(NumberFormat.INT8, codes, _steps(scale, shape[1], _INT8_ZERO))


INT8 = StoredFormat("compressed-tensors int-quantized", (".weight_scale", ".weight"), _read_int8)
"""Format of the W8A8 matrices of compressed-tensors: 8-bit integers without zero points, with one float scale per row
or a single scale for the matrix."""


def packed_int4_format(group: int) -> StoredFormat:
    """Return the format of the W4A16 matrices of compressed-tensors: 4-bit integers without zero points. Eight adjacent
    integers of a row are packed into one 32-bit word.

    `group`: how many adjacent integers of a row share a scale; 0: the whole row."""
    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    return StoredFormat("compressed-tensors pack-quantized", suffixes, _read_packed_int4, (group,))


def _read_packed_int4(parts: Parts, shape: tuple[int, int], group: int) -> AnyMatrix:
    rows, columns = shape
    group = group or columns
    packed, scale = parts[".weight_packed"], _finite(parts[".weight_scale"])
    _require(packed, (rows, -(-columns // 8)), torch.int32)
    _require(scale, (rows, -(-columns // group)))
    if parts[".weight_shape"].tolist() != list(shape):
        raise ValueError(f"weight_shape is {parts['.weight_shape'].tolist()}, expected {list(shape)}")
    codes = _nibbles(packed)[:, :columns]
    if not _fits(columns, group):
        return (codes.to(torch.float32) - _INT4_ZERO) * scale.repeat_interleave(group, 1)[:, :columns]
    return CodedMatrix(NumberFormat.INT4, codes, _steps(parts[".weight_scale"], group, _INT4_ZERO))


def _read_nvfp4(parts: Parts, shape: tuple[int, int]) -> AnyMatrix:
    return _nvfp4(parts[".weight_packed"], parts[".weight_scale"], _finite(parts[".weight_global_scale"]), shape)


def _read_modelopt_nvfp4(parts: Parts, shape: tuple[int, int]) -> AnyMatrix:
    factor = _finite(parts[".weight_scale_2"])
    return _nvfp4(parts[".weight"], parts[".weight_scale"], _finite(1 / factor), shape)


def _nvfp4(packed: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor, shape: tuple[int, int]) -> AnyMatrix:
    rows, columns = shape
    _require(packed, (rows, columns // 2), torch.uint8)
    _require(scale, (rows, columns // _NVFP4_GROUP), torch.float8_e4m3fn)
    divisors = divisor.view(1, 1).expand(rows, 1)
    if not bool(divisors.all()):
        raise ValueError("scales that are not finite numbers")
    scales = Scales(ScaleFormat.FLOAT8, (scale.view(torch.uint8), divisors), _NVFP4_GROUP)
    return _coded_or_floats(NumberFormat.E2M1, _pairs(packed), scales)


NVFP4 = StoredFormat(
    "compressed-tensors nvfp4-pack-quantized",
    (".weight_packed", ".weight_scale", ".weight_global_scale"),
    _read_nvfp4,
)
"""Format of the NVFP4 matrices of compressed-tensors: 4-bit floats (e2m1), two to a byte.

Every 16 adjacent numbers of a row have a float8 scale, and the whole matrix has one more, by which they are divided."""

MODELOPT_NVFP4 = StoredFormat("modelopt NVFP4", (".weight_scale_2", ".weight_scale", ".weight"), _read_modelopt_nvfp4)
"""Format of the NVFP4 matrices of NVIDIA's Model Optimizer: as `NVFP4`, but the scales are multiplied by that of the
matrix. Here they are divided by its inverse, so values differ by a few units in the last place of float32 at most."""


def _read_mxfp4(parts: Parts, shape: tuple[int, int]) -> AnyMatrix:
    rows, columns = shape
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    _require(packed, (rows, columns // 2), torch.uint8)
    _require(scale, (rows, -(-columns // _MXFP4_GROUP)), torch.uint8)
    scales = Scales(ScaleFormat.POWER, (scale,), _MXFP4_GROUP)
    return _coded_or_floats(NumberFormat.E2M1, _pairs(packed), scales)


MXFP4 = StoredFormat("compressed-tensors mxfp4-pack-quantized", (".weight_packed", ".weight_scale"), _read_mxfp4)
"""Format of the MXFP4 matrices of compressed-tensors: 4-bit floats (e2m1), two to a byte.

Every 32 adjacent numbers of a row have one scale, which is a power of two."""


def gptq_format(zero_offset: int) -> StoredFormat:
    """Return the format of GPTQ matrices `[in, out]`: 4-bit integers. Eight adjacent integers of a column are packed
    into one 32-bit word.

    The inputs are divided into groups, and the tensor `g_idx` holds the number of each input's group. Each group has
    one zero point and one scale per output. `zero_offset`: number added to each stored zero point, 0 for version 2 of
    the format and otherwise 1."""
    return StoredFormat("gptq", (".qweight", ".qzeros", ".scales", ".g_idx"), _read_gptq, (zero_offset,))


def _read_gptq(parts: Parts, shape: tuple[int, int], zero_offset: int) -> AnyMatrix:
    outs, ins = shape
    scale, groups = parts[".scales"], parts[".g_idx"].to(torch.int64)
    _require(parts[".qweight"], (ins // 8, outs), torch.int32)
    _require(parts[".qzeros"], (len(scale), outs // 8), torch.int32)
    _require(scale, (len(scale), outs))
    if groups.shape != (ins,) or bool(((groups < 0) | (groups >= len(scale))).any()):
        raise ValueError(f"g_idx of shape {list(groups.shape)} does not name {len(scale)} groups of {ins} inputs")
    return _with_zeros(_nibbles(parts[".qweight"].T), _nibbles(parts[".qzeros"]).T + zero_offset, scale.T, groups)


def awq_format(group: int) -> StoredFormat:
    """Return the format of AWQ matrices `[in, out]`: 4-bit integers. Eight adjacent integers of a row are packed into
    one 32-bit word.

    `group`: how many adjacent inputs share one zero point and one scale per output; 0 or less: all inputs share them.
    """
    return StoredFormat("awq", (".qweight", ".qzeros", ".scales"), _read_awq, (group,))


def _read_awq(parts: Parts, shape: tuple[int, int], group: int) -> AnyMatrix:
    outs, ins = shape
    group = group if group > 0 else ins
    scale, num_groups = parts[".scales"], -(-ins // group)
    _require(parts[".qweight"], (ins, outs // 8), torch.int32)
    _require(parts[".qzeros"], (num_groups, outs // 8), torch.int32)
    _require(scale, (num_groups, outs))
    numbers, zeros = (_nibbles(parts[part], _AWQ_ORDER).T for part in (".qweight", ".qzeros"))
    return _with_zeros(numbers, zeros, scale.T, torch.arange(ins) // group)


def _with_zeros(codes: torch.Tensor, zeros: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor) -> AnyMatrix:
    """Return the matrix `(code - zero) * scale`: as codes if they can represent it, else as float32.

    `codes` is `[outs, ins]`, `zeros` and `scale` are `[outs, groups]`, and `groups` `[ins]` is the group of each input.
    Codes need groups of adjacent inputs and float16 scales."""
    wide, ins = _finite(scale), codes.shape[1]
    size = ins // wide.shape[1] if ins % wide.shape[1] == 0 else ins + 1
    is_ordered = torch.equal(groups, torch.arange(ins) // size)
    if is_ordered and scale.dtype == torch.float16 and _fits(ins, size):
        parts = (scale.contiguous(), zeros.contiguous())
        return CodedMatrix(NumberFormat.INT4, codes.contiguous(), Scales(ScaleFormat.HALF_ZEROS, parts, size))
    return (codes.float() - zeros.float()[:, groups]) * wide[:, groups]


# ---- GGUF: a row of a matrix is a row of blocks, each a struct of ggml-common.h.


class _Blocks:
    """Reader of the fields of blocks, given as uint8 `[n, blocks, bytes]`: each call returns the next field of all
    blocks."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._place = 0

    def bytes(self, count: int) -> torch.Tensor:
        """Return the next `count` bytes of each block, as uint8 `[n, blocks, count]`."""
        self._place += count
        return self._blocks[..., self._place - count : self._place]

    def half(self) -> torch.Tensor:
        """Return the float16 number in the next two bytes of each block, `[n, blocks]`."""
        return self.bytes(2).contiguous().view(torch.float16)[..., 0]


def _low_and_high(packed: torch.Tensor) -> torch.Tensor:
    """Return the low four bits of all bytes `[..., count]`, then the high ones, `[..., 2 * count]`."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of `bits` bits of bytes `[..., count]`: the lowest of all bytes, then the next, and so on."""
    return torch.cat([packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the 32 bits of four bytes, the lowest of the first byte first, as numbers of 16 or 0."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _coded(numbers: NumberFormat, codes: torch.Tensor, scales: Scales) -> CodedMatrix:
    return CodedMatrix(numbers, codes.reshape(len(codes), -1), scales)


def _q4_0(blocks: _Blocks) -> CodedMatrix:
    step = blocks.half()
    return _coded(NumberFormat.INT4, _low_and_high(blocks.bytes(16)), Scales(ScaleFormat.HALF, (step,), 32, 8))


def _q4_1(blocks: _Blocks) -> CodedMatrix:
    pairs = (blocks.half(), blocks.half())
    return _coded(NumberFormat.INT4, _low_and_high(blocks.bytes(16)), Scales(ScaleFormat.HALF_PAIRS, pairs, 32))


def _q5_0(blocks: _Blocks) -> CodedMatrix:
    step, fifth = blocks.half(), _fifth_bits(blocks.bytes(4))
    codes = _low_and_high(blocks.bytes(16)) | fifth
    return _coded(NumberFormat.INT5, codes, Scales(ScaleFormat.HALF, (step,), 32, 16))


def _q5_1(blocks: _Blocks) -> CodedMatrix:
    pairs, fifth = (blocks.half(), blocks.half()), _fifth_bits(blocks.bytes(4))
    codes = _low_and_high(blocks.bytes(16)) | fifth
    return _coded(NumberFormat.INT5, codes, Scales(ScaleFormat.HALF_PAIRS, pairs, 32))


def _q8_0(blocks: _Blocks) -> CodedMatrix:
    step = blocks.half()
    # Adds 128 to a signed byte.
    return _coded(NumberFormat.INT8, blocks.bytes(32) ^ 128, Scales(ScaleFormat.HALF, (step,), 32, _INT8_ZERO))


def _q2_k(blocks: _Blocks) -> CodedMatrix:
    pairs, quants = blocks.bytes(16), split_last(blocks.bytes(64), 2, 32)
    parts = (pairs.flatten(1), blocks.half(), blocks.half())
    return _coded(NumberFormat.INT2, _bits_of(quants, 2), Scales(ScaleFormat.NIBBLE_PAIRS, parts, 16))


def _q3_k(blocks: _Blocks) -> CodedMatrix:
    high, quants, packed = blocks.bytes(32), split_last(blocks.bytes(64), 2, 32), blocks.bytes(12)
    codes = _bits_of(quants, 2).flatten(-2) | _bits_of(high, 1) << 2
    top = _bits_of(packed[..., 8:], 2)
    factors = _low_and_high(packed[..., :8]) | top << 4
    # A factor is stored plus 32, and in our parts plus 128.
    parts = (factors.flatten(1) + 96, blocks.half())
    return _coded(NumberFormat.INT3, codes, Scales(ScaleFormat.INNER, parts, 16, 4))


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of steps and of bases, `[n, 8 * blocks]` each, of 12 bytes of Q4_K and Q5_K."""
    first, second, rest = split_last(packed, 3, 4).unbind(-2)
    steps = torch.cat((first & 63, (rest & 15) | (first >> 6) << 4), -1)
    bases = torch.cat((second & 63, (rest >> 4) | (second >> 6) << 4), -1)
    return steps.flatten(1), bases.flatten(1)


def _q4_k(blocks: _Blocks) -> CodedMatrix:
    outer = (blocks.half(), blocks.half())
    scales = Scales(ScaleFormat.INNER_PAIRS, (*_six_bit_pairs(blocks.bytes(12)), *outer), 32)
    return _coded(NumberFormat.INT4, _low_and_high(split_last(blocks.bytes(128), 4, 32)), scales)


def _q5_k(blocks: _Blocks) -> CodedMatrix:
    outer = (blocks.half(), blocks.half())
    scales = Scales(ScaleFormat.INNER_PAIRS, (*_six_bit_pairs(blocks.bytes(12)), *outer), 32)
    fifth = _bits_of(blocks.bytes(32), 1) << 4
    codes = _low_and_high(split_last(blocks.bytes(128), 4, 32)).flatten(-2) | fifth
    return _coded(NumberFormat.INT5, codes, scales)


def _q6_k(blocks: _Blocks) -> CodedMatrix:
    low = _low_and_high(split_last(blocks.bytes(128), 2, 64)).flatten(-2)
    high = _bits_of(split_last(blocks.bytes(64), 2, 32), 2).flatten(-2)
    factors, outer = blocks.bytes(16) ^ 128, blocks.half()
    return _coded(NumberFormat.INT6, low | high << 4, Scales(ScaleFormat.INNER, (factors.flatten(1), outer), 16, 32))


def _mxfp4(blocks: _Blocks) -> CodedMatrix:
    exponents = blocks.bytes(1).flatten(1)
    return _coded(NumberFormat.E2M1, _low_and_high(blocks.bytes(16)), Scales(ScaleFormat.POWER, (exponents,), 32))


class _BlockType(NamedTuple):
    """A type of block: the function that reads such blocks, and how many numbers and bytes a block has."""

    read: Callable[[_Blocks], CodedMatrix]
    size: int
    num_bytes: int


_BLOCKS = {
    "q4_0": _BlockType(_q4_0, 32, 18),
    "q4_1": _BlockType(_q4_1, 32, 20),
    "q5_0": _BlockType(_q5_0, 32, 22),
    "q5_1": _BlockType(_q5_1, 32, 24),
    "q8_0": _BlockType(_q8_0, 32, 34),
    "q2_k": _BlockType(_q2_k, 256, 84),
    "q3_k": _BlockType(_q3_k, 256, 110),
    "q4_k": _BlockType(_q4_k, 256, 144),
    "q5_k": _BlockType(_q5_k, 256, 176),
    "q6_k": _BlockType(_q6_k, 256, 210),
    "mxfp4": _BlockType(_mxfp4, 32, 17),
}


def _read_gguf(parts: Parts, shape: tuple[int, int], kind: str) -> AnyMatrix:
    rows, columns = shape
    block, stored = _BLOCKS[kind], parts[f".weight_{kind}"]
    if columns % block.size:
        raise ValueError(f"rows of {columns} numbers, which are no whole blocks of {block.size}")
    _require(stored, (rows, columns // block.size * block.num_bytes), torch.uint8)
    return block.read(_Blocks(stored.view(rows, -1, block.num_bytes)))


GGUF_FORMATS = {
    kind: StoredFormat(f"GGUF {kind.upper()}", (f".weight_{kind}",), _read_gguf, (kind,)) for kind in _BLOCKS
}
"""Formats of a converted GGUF file's matrices, by the name of a type of ggml in lower case: blocks of this type, stored
as uint8 `[rows, bytes of a row]`. Blocks of other types become floats."""


# ---- what the formats share


def _steps(scale: torch.Tensor, group: int, offset: int = 0) -> Scales:
    """Return scales as they are stored if they are float16, else as float32."""
    is_half = scale.dtype == torch.float16
    parts = (scale.contiguous() if is_half else scale.to(torch.float32).contiguous(),)
    return Scales(ScaleFormat.HALF if is_half else ScaleFormat.FLOAT, parts, group, offset)


def _fits(columns: int, group: int) -> bool:
    """Return whether codes can hold rows of `columns` numbers with a scale for each `group`."""
    return columns % GROUP == 0 and columns % group == 0 and (group % GROUP == 0 or group == _LEAST_GROUP)


def _coded_or_floats(numbers: NumberFormat, codes: torch.Tensor, scales: Scales) -> AnyMatrix:
    """Return a matrix as codes, or as floats if its rows are no multiple of 32 long."""
    columns = codes.shape[1]
    if columns % GROUP == 0:
        return CodedMatrix(numbers, codes, scales)
    filled = torch.nn.functional.pad(codes, (0, -columns % GROUP))
    steps, *others = scales.parts
    steps = torch.nn.functional.pad(steps, (0, filled.shape[1] // scales.group - steps.shape[1]))
    whole = CodedMatrix(numbers, filled, Scales(scales.format, (steps, *others), scales.group))
    return whole.floats()[:, :columns].contiguous()


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return the two codes of each byte, the low four bits first, `[rows, 2 * bytes]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return the eight numbers of four bits of each 32-bit word, `[rows, 8 * words]`.

    `order`: place among the eight of each four bits, lowest first."""
    places = torch.empty(8, dtype=torch.int32)
    places[torch.tensor(order)] = torch.arange(8, dtype=torch.int32)
    return (words[..., None] >> (4 * places) & 15).to(torch.uint8).flatten(-2)


def _per_row(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return scales as a column: one per row, or one of the whole matrix. Raises ValueError for another number."""
    if scale.numel() not in (1, shape[0]):
        raise ValueError(f"scales of shape {list(scale.shape)} for a matrix of {list(shape)}")
    return scale.view(-1, 1).expand(shape[0], 1)


def _finite(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32. Raises ValueError where one is not a finite number."""
    wide = scale.to(torch.float32)
    if not bool(wide.isfinite().all()):
        raise ValueError("scales that are not finite numbers")
    return wide


def _require(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if tuple(tensor.shape) != shape or dtype not in (None, tensor.dtype):
        expected = f"{dtype or 'numbers'} of shape {list(shape)}"
        raise ValueError(f"{tensor.dtype} of shape {list(tensor.shape)}, expected {expected}")
