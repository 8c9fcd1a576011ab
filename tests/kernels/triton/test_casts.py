"""Roundings of the kernels' shared casts equal torch's bit by bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tandem_kernels.contract import FLOAT8
from tandem_kernels.triton.interpret import float8_bits, narrow

_BLOCK = 1024


@triton.jit
def _narrow_kernel(p_x, p_out, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o_x, narrow(tl.load(p_x + o_x), p_out.dtype.element_ty))


@triton.jit
def _float8_kernel(p_x, p_out, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o_x, float8_bits(tl.load(p_x + o_x)))


def _numbers() -> torch.Tensor:
    """Each of the 2**16 upper halves of a float32's bits in turn by a stride, with lower halves at and beside ties."""
    upper = torch.arange(0, 1 << 16, 13, dtype=torch.int64) << 16
    lower = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] | lower).flatten()
    bits = bits[: len(bits) // _BLOCK * _BLOCK]
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype, device: torch.device) -> None:
    x = _numbers()
    out = torch.empty(len(x), dtype=dtype, device=device)
    _narrow_kernel[(len(x) // _BLOCK,)](x.to(device), out, BLOCK=_BLOCK)
    torch.testing.assert_close(out.cpu(), x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_float8(device: torch.device) -> None:
    """Every float8 number, the middles between neighbours, and what lies beside both; NaN; what is too large."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    points = torch.cat((codes, middles, torch.tensor([448.1, 460.0, 1e9, 1e-9, 1e-40])))
    beside = [torch.nextafter(points, torch.tensor(to)) for to in (0.0, torch.inf)]
    x = torch.cat((points, *beside))
    x = torch.cat((x, -x, torch.tensor([torch.nan, torch.inf, -torch.inf])))
    x = torch.nn.functional.pad(x, (0, -len(x) % _BLOCK))
    out = torch.empty(len(x), dtype=torch.uint8, device=device)
    _float8_kernel[(len(x) // _BLOCK,)](x.to(device), out, BLOCK=_BLOCK)
    got, expected = out.cpu().view(FLOAT8).float(), x.clamp(-448, 448).to(FLOAT8).float()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan())
