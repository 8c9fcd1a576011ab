"""Compute the gating product of a gated MLP on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.interpret import UNFUSED, narrow, rounded_to, widen

# Elements of one program, and its warps: 8 elements per thread, one 16-byte load of a half type.
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _gate_kernel(p_gate_up, p_out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_out = o_out < WIDTH
    p_gate = p_gate_up + i_row * row_stride + o_out
    # [BLOCK]
    b_gate = widen(tl.load(p_gate, mask=m_out, other=0.0))
    # [BLOCK]
    b_up = widen(tl.load(p_gate + WIDTH, mask=m_out, other=0.0))
    b_denominator = 1.0 + tl.exp(-b_gate)
    b_silu = tl.div_rn(b_gate, b_denominator) if b_gate.dtype == tl.float32 else b_gate / b_denominator
    dtype: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_out + i_row * WIDTH + o_out, narrow(rounded_to(b_silu, dtype) * b_up, dtype), mask=m_out)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `tandem_kernels.contract`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _gate_kernel[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS, **UNFUSED)
    return out
