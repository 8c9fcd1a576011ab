"""Keep weights in few bits in the memory of a GPU, in the layout that its kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tandem_kernels.contract import FLOAT8_GROUP
from tandem_kernels.reference.coded import CodedMatrix, NumberFormat, ScaleFormat, Scales

_NIBBLE_BITS = 4


@dataclass(frozen=True, slots=True)
class DeviceCodes:
    """Weights `[..., n, k]` in few bits. `data`: uint8, the codes in row-major order: of numbers of at most four bits
    two to a byte, the lower bits first, of others one. The parts of `scales` have a row per row of k weights.
    `rounds_rows`: products are those of rows rounded to float8, see `contract.linear`."""

    numbers: NumberFormat
    data: torch.Tensor
    scales: Scales
    shape: tuple[int, ...]
    rounds_rows: bool = False

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + sum(part.nbytes for part in self.scales.parts)

    def with_rounded_rows(self) -> DeviceCodes:
        """Return the same weights, whose products round rows to float8 if the numbers are of float8 and no group of
        scales begins or ends inside `FLOAT8_GROUP` components."""
        scales = self.scales
        is_whole = scales.group == self.shape[-1] or scales.group % FLOAT8_GROUP == 0
        is_float8 = self.numbers is NumberFormat.E4M3 and scales.format in (ScaleFormat.FLOAT, ScaleFormat.HALF)
        return replace(self, rounds_rows=is_float8 and is_whole)

    def split_rows(self, count: int) -> DeviceCodes:
        """Return a matrix `[count * n, k]` as `[count, n, k]`."""
        return replace(self, shape=(count, self.shape[0] // count, self.shape[1]))

    def floats(self) -> torch.Tensor:
        """Return the weights as float32 in host memory."""
        parts = tuple(part.cpu() for part in self.scales.parts)
        codes = self.data.cpu()
        if has_nibbles(self.numbers):
            codes = torch.stack((codes & 15, codes >> _NIBBLE_BITS), -1)
        codes = codes.view(math.prod(self.shape[:-1]), self.shape[-1])
        return CodedMatrix(self.numbers, codes, replace(self.scales, parts=parts)).floats().view(self.shape)


def has_nibbles(numbers: NumberFormat) -> bool:
    """Return whether numbers are two to a byte in `DeviceCodes`."""
    return numbers.bits <= _NIBBLE_BITS


def to_device_codes(matrix: CodedMatrix, device: torch.device) -> DeviceCodes:
    """Copy a matrix to the memory of a device."""
    codes = matrix.codes
    if has_nibbles(matrix.numbers):
        codes = codes[:, ::2] | codes[:, 1::2] << _NIBBLE_BITS
    parts = tuple(part.to(device).contiguous() for part in matrix.scales.parts)
    scales = replace(matrix.scales, parts=parts)
    return DeviceCodes(matrix.numbers, codes.contiguous().to(device), scales, matrix.shape)
