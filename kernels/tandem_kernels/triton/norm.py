"""Compute on the GPU root-mean-square normalisation, one program per row, and the gating product of a gated MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.interpret import UNFUSED, inverse_rms, narrow, rounded_to, widen

# Largest padded row width, in elements -> warps. A row stays in registers: 16K elements are 16 per thread.
_WARPS = {1024: 4, 4096: 8, 8192: 16, 16384: 32}
# Elements of one program of the gate, and its warps: 8 elements per thread, one 16-byte load of a half type.
_GATE_BLOCK, _GATE_WARPS = 1024, 4


@triton.jit
def _norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_total,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < WIDTH
    dtype: tl.constexpr = p_x.dtype.element_ty
    # [BLOCK]
    b_x = widen(tl.load(p_x + i_row * x_stride + o_x, mask=m_x, other=0.0))
    if HAS_RESIDUAL:
        # [BLOCK]
        b_residual = widen(tl.load(p_residual + i_row * residual_stride + o_x, mask=m_x, other=0.0))
        b_x = rounded_to(b_residual + b_x, dtype)
        tl.store(p_total + i_row * WIDTH + o_x, narrow(b_x, dtype), mask=m_x)
    b_wide = b_x.to(tl.float32)
    b_normed = b_wide * inverse_rms(tl.sum(b_wide * b_wide, axis=0), WIDTH, eps)
    b_normed = rounded_to(b_normed.to(b_x.dtype), dtype)
    # [BLOCK]
    b_weight = widen(tl.load(p_weight + o_x, mask=m_x, other=0.0))
    tl.store(p_out + i_row * WIDTH + o_x, narrow(b_weight * b_normed, dtype), mask=m_x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` divided by the root mean square of its last dimension and multiplied by `weight`. The exact result is
    defined in `tandem_kernels.contract`."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out, None, eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm(x + residual, weight, eps)` and the sum `x + residual`. The exact result is defined in
    `tandem_kernels.contract`."""
    rows = _rows(x)
    out, total = (torch.empty(rows.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(rows, _rows(residual), weight, out, total, eps)
    return out.view(x.shape), total.view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape `[..., D]` to `[rows, D]` with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    """Launch the kernel. Raises ValueError for rows that do not fit in registers."""
    count, width = x.shape
    block = triton.next_power_of_2(width)
    warps = next((warps for widest, warps in _WARPS.items() if block <= widest), None)
    if warps is None:
        raise ValueError(f"rows of {width} numbers: rms_norm holds at most {max(_WARPS)} in registers")
    if not count:
        return
    _norm_kernel[(count,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=warps,
        **UNFUSED,
    )


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
    """Return the gating product of an MLP, `silu(gate) * up`, of the two halves `gate` and `up` of each row of
    `gate_up` `[T, 2 * I]`. The exact result is defined in `tandem_kernels.contract`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, _GATE_BLOCK))
        _gate_kernel[grid](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=_GATE_BLOCK, num_warps=_GATE_WARPS, **UNFUSED
        )
    return out
