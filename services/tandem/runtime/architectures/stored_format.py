"""Restore the values of matrices that a checkpoint stores in few bits.

Values are restored when the weights are read, as float32 products with the scales. Activations are not rounded,
whatever a file asks for. Each format says which tensors hold a matrix, and how its values follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each four bits of a word of AWQ hold, lowest bits first."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NVFP4_GROUP = 16


class StoredFormat(Protocol):
    """Format of matrices. A checkpoint has `base + suffix` for each of the suffixes of a matrix that it stores so."""

    @property
    def name(self) -> str:
        """Return the name of the format, for messages."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of the tensors of each matrix, the one that marks it first."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the suffixes of tensors that a matrix may have, too."""
        ...

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        """Return the float32 values of a matrix from its tensors by suffix.

        Raises ValueError when a tensor does not fit the shape or has another dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Float8Format:
    """Numbers of eight bits (e4m3) with float scales. `scale`: suffix of the scales. `block`: rows and columns that
    share a scale; None: each row has one, or the whole matrix."""

    name: str
    scale: str
    block: tuple[int, int] | None = None
    optional: tuple[str, ...] = ()

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.scale, ".weight")

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        numbers, scale = parts[".weight"], _finite(parts[self.scale])
        _require(numbers, shape, torch.float8_e4m3fn)
        if self.block is None:
            return numbers.to(torch.float32) * _per_row(scale, shape)
        rows, columns = self.block
        _require(scale, (-(-shape[0] // rows), -(-shape[1] // columns)))
        whole = scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
        return numbers.to(torch.float32) * whole


@dataclass(frozen=True, slots=True)
class Int8Format:
    """Symmetric numbers of eight bits with a float scale per row or matrix, as compressed-tensors stores W8A8."""

    name: str = "compressed-tensors int-quantized"
    suffixes: tuple[str, ...] = (".weight_scale", ".weight")
    optional: tuple[str, ...] = ()

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        _require(parts[".weight"], shape, torch.int8)
        return parts[".weight"].to(torch.float32) * _per_row(_finite(parts[".weight_scale"]), shape)


@dataclass(frozen=True, slots=True)
class PackedInt4Format:
    """Symmetric numbers of four bits, eight to a word along a row, with a scale per `group` of them, as
    compressed-tensors stores W4A16. A group of 0 is the whole row."""

    group: int
    name: str = "compressed-tensors pack-quantized"
    suffixes: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape")
    optional: tuple[str, ...] = ()

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        rows, columns = shape
        group = self.group or columns
        packed, scale = parts[".weight_packed"], _finite(parts[".weight_scale"])
        _require(packed, (rows, -(-columns // 8)), torch.int32)
        _require(scale, (rows, -(-columns // group)))
        if parts[".weight_shape"].tolist() != list(shape):
            raise ValueError(f"weight_shape is {parts['.weight_shape'].tolist()}, expected {list(shape)}")
        numbers = _nibbles(packed)[:, :columns] - 8
        return numbers * scale.repeat_interleave(group, 1)[:, :columns]


@dataclass(frozen=True, slots=True)
class Nvfp4Format:
    """Numbers of four bits (e2m1), two to a byte, with a float8 scale for each 16 and one of the whole matrix."""

    name: str = "compressed-tensors nvfp4-pack-quantized"
    suffixes: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_global_scale")
    optional: tuple[str, ...] = (".input_global_scale",)

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        rows, columns = shape
        packed, scale = parts[".weight_packed"], parts[".weight_scale"]
        _require(packed, (rows, columns // 2), torch.uint8)
        _require(scale, (rows, columns // _NVFP4_GROUP), torch.float8_e4m3fn)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).to(torch.int64)
        scales = _finite(scale) / _finite(parts[".weight_global_scale"])
        return torch.tensor(_E2M1)[codes] * scales.repeat_interleave(_NVFP4_GROUP, 1)


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """Numbers of four bits, eight to a word along a column of `[in, out]`, with zeros and scales per group of inputs;
    `g_idx` names the group of each input. `zero_offset`: what is added to a stored zero, 1 but for version 2."""

    zero_offset: int
    name: str = "gptq"
    suffixes: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")
    optional: tuple[str, ...] = ()

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        outs, ins = shape
        scale, groups = _finite(parts[".scales"]), parts[".g_idx"].to(torch.int64)
        _require(parts[".qweight"], (ins // 8, outs), torch.int32)
        _require(parts[".qzeros"], (len(scale), outs // 8), torch.int32)
        _require(scale, (len(scale), outs))
        if groups.shape != (ins,) or bool(((groups < 0) | (groups >= len(scale))).any()):
            raise ValueError(f"g_idx of shape {list(groups.shape)} does not name {len(scale)} groups of {ins} inputs")
        numbers = _nibbles(parts[".qweight"].T).T
        zeros = _nibbles(parts[".qzeros"]) + self.zero_offset
        return ((numbers - zeros[groups]) * scale[groups]).T


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """Numbers of four bits, eight outputs to a word of `[in, out]`, with zeros and scales per `group` of inputs."""

    group: int
    name: str = "awq"
    suffixes: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    optional: tuple[str, ...] = ()

    def restore(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        outs, ins = shape
        group = self.group if self.group > 0 else ins
        scale, num_groups = _finite(parts[".scales"]), -(-ins // group)
        _require(parts[".qweight"], (ins, outs // 8), torch.int32)
        _require(parts[".qzeros"], (num_groups, outs // 8), torch.int32)
        _require(scale, (num_groups, outs))
        numbers, zeros = (_nibbles(parts[part], _AWQ_ORDER) for part in (".qweight", ".qzeros"))
        groups = torch.arange(ins) // group
        return ((numbers - zeros[groups]) * scale[groups]).T


def _nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return the eight numbers of four bits of each 32-bit word, `[rows, 8 * words]`.

    `order`: place among the eight of each four bits, lowest first."""
    places = torch.empty(8, dtype=torch.int64)
    places[torch.tensor(order)] = torch.arange(8)
    wide = words.to(torch.int64)[..., None] >> (4 * places)
    return (wide & 15).flatten(-2)


def _per_row(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return scales as a column: one per row, or one of the whole matrix. Raises ValueError for another number."""
    if scale.numel() not in (1, shape[0]):
        raise ValueError(f"scales of shape {list(scale.shape)} for a matrix of {list(shape)}")
    return scale.view(-1, 1)


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
