"""Detect whether Triton compiles or interprets kernels, and provide the casts and roots that kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Read once, because Triton decides when a kernel is defined whether it is compiled or interpreted.
INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))

# Products and sums are rounded separately, as in the reference kernels; these kernels are memory-bound anyway.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def widen(b):
    """Convert half types to float32 and return other types unchanged: the type in which kernels compute."""
    return b.to(tl.float32) if b.dtype.primitive_bitwidth == 16 else b


@triton.jit
def narrow(b, DTYPE: tl.constexpr):
    """Convert `b`, which is not a half type, to DTYPE: to nearest, ties to even."""
    if INTERPRETED and DTYPE.is_bf16():
        # The interpreter's own cast truncates.
        bits = b.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrowed = tl.where(b != b, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = b.to(DTYPE)
    return narrowed


@triton.jit
def rounded_to(b, DTYPE: tl.constexpr):
    """Round `b` to DTYPE and return it in the type in which kernels compute (float32 for half types)."""
    return widen(narrow(b, DTYPE))


@triton.jit
def inverse_rms(squares, WIDTH: tl.constexpr, eps):
    """Compute `1 / sqrt(squares / WIDTH + eps)` of float32 sums of WIDTH squares.

    Each operation is correctly rounded; the cost is small because a row needs only one."""
    mean = tl.div_rn(squares, tl.full(squares.shape, WIDTH, tl.float32))
    return tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def float8_bits(b):
    """Convert float32 numbers to the bits of float8 e4m3: to nearest, ties to even, beyond 448 to 448, NaN to NaN.

    Integer arithmetic throughout, so that a GPU without the type computes the same as one with it.
    """
    bits = b.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    # 0x43E00000 is 448, 0x3C800000 is 2**-6, 0x46800000 is 2**14.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    # Normal from 2**-6 on: 3 of 23 mantissa bits stay, and the exponent's bias becomes 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal below that: steps are 2**-9, the last mantissa bit of a float32 at 2**14.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return tl.where(b != b, 0x7F, sign | code).to(tl.uint8)
