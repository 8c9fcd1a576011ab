"""Compute batch-invariant products of rows with a weight, and products with weights in few bits.

One program per tile of the result adds up products in the order of the inputs. The tile size depends only on the
weight, and missing rows of the last tile are zeros, so that the operations for a row are the same whatever other rows
are in the call (He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025). A library is faster,
because it chooses tiles and splits of the sum by the number of rows; it does not know weights in few bits, though.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.triton.attention_tile import FUSED
from tandem_kernels.triton.interpret import narrow, widen
from tandem_kernels.triton.product import add_product, arguments_of, inputs_per_tile, row_tile


class LinearTiles(NamedTuple):
    """Tile sizes and launch options of `linear`.

    A program computes `block_m` rows by `block_n` outputs, and reads `block_k` inputs at a time. `warps` and `stages`
    are Triton's launch options: `stages - 1` blocks of inputs are being loaded while one is multiplied.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


_WIDE = 16384
"""Least number of outputs for which wide tiles occupy all SMs of a GPU in a step with only one row of tiles."""

TILES = {
    # (at least _WIDE outputs, bytes of an element)
    (False, 2): LinearTiles(128, 64, 64, 8, 4),
    (True, 2): LinearTiles(128, 128, 64, 8, 4),
    (False, 4): LinearTiles(64, 32, 32, 8, 3),
    (True, 4): LinearTiles(64, 64, 32, 8, 3),
}
"""Chosen by the compiled code for sm_90 (registers, spills, shared memory), not yet by measured time."""

CODED_TILES = {
    # (at most _FEW_ROWS rows, bytes of an element of the rows)
    (False, 2): LinearTiles(64, 64, 64, 4, 3),
    (True, 2): LinearTiles(16, 32, 128, 4, 4),
    (False, 4): LinearTiles(32, 32, 32, 4, 3),
    (True, 4): LinearTiles(16, 32, 32, 4, 3),
}
"""The same for weights in few bits. Restored weights are in registers, so that a program has fewer outputs."""

_FEW_ROWS = 32
_BAND = 8
"""Rows of tiles whose programs start together, so that their parts of the rows and of the weight stay in the L2."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    p_out,  # [num_rows, OUTPUTS]
    # From p_x to `scales`, and FORM: the fields of `ProductArguments`.
    p_x,  # [num_rows, INPUTS]
    p_x_scales,
    p_weight,  # [OUTPUTS, INPUTS]
    scales,
    p_bias,  # [OUTPUTS] or None
    num_rows,
    FORM: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_tile = tl.program_id(0)
    in_band = BAND * tl.cdiv(OUTPUTS, BLOCK_N)
    first = i_tile // in_band * BAND
    height = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first, BAND)
    o_rows = (first + i_tile % in_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_outputs = i_tile % in_band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    m_rows, m_outputs = o_rows < num_rows, o_outputs < OUTPUTS

    # Row offsets are 64 bits wide, because a matrix may have more than 2**31 elements.
    o_rows, o_outputs = o_rows.to(tl.int64), o_outputs.to(tl.int64)
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dtype: tl.constexpr = p_out.dtype.element_ty
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        b_x, b_scales = row_tile(p_x, p_x_scales, o_rows, m_rows, start, FORM, INPUTS, BLOCK_K)
        b_acc = add_product(
            b_acc, b_x, b_scales, p_weight, scales, o_outputs, m_outputs, start, FORM, INPUTS, BLOCK_K, dtype
        )
    if p_bias is not None:
        b_acc += widen(tl.load(p_bias + o_outputs, mask=m_outputs, other=0.0))[None, :]
    p_out += o_rows[:, None] * OUTPUTS + o_outputs[None, :]
    tl.store(p_out, narrow(b_acc, dtype), mask=m_rows[:, None] & m_outputs[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor | DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, batch-invariantly. The exact result is defined in `tandem_kernels.contract`. Raises
    ValueError when dtypes, shapes or strides are not supported."""
    _check(x, weight, bias)
    if isinstance(weight, torch.Tensor):
        return _launch(x, weight, bias, TILES[weight.shape[0] >= _WIDE, x.element_size()])
    return _launch(x, weight, bias, CODED_TILES[False, x.element_size()])


def linear_for_rows(x: torch.Tensor, weight: torch.Tensor | DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias` with operations that suit the number of rows, so not batch-invariantly: cuBLAS's for
    floats. The exact result is defined in `tandem_kernels.contract`. Raises ValueError like `linear` for codes."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    _check(x, weight, bias)
    return _launch(x, weight, bias, CODED_TILES[len(x) <= _FEW_ROWS, x.element_size()])


def _launch(
    x: torch.Tensor, weight: torch.Tensor | DeviceCodes, bias: torch.Tensor | None, tiles: LinearTiles
) -> torch.Tensor:
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    *arguments, form = arguments_of(x.contiguous(), weight)
    _linear_kernel[(triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(outputs, tiles.block_n),)](
        out,
        *arguments,
        bias,
        num_rows,
        FORM=form,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=inputs_per_tile(weight, tiles.block_k),
        BAND=_BAND,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **FUSED,
    )
    return out


def _check(x: torch.Tensor, weight: torch.Tensor | DeviceCodes, bias: torch.Tensor | None) -> None:
    if isinstance(weight, torch.Tensor):
        kind, strides, is_dense = weight.dtype, weight.stride(), weight.is_contiguous()
    else:
        kind, strides, is_dense = x.dtype, (), True
    if x.dtype not in _DTYPES or kind != x.dtype:
        raise ValueError(f"rows of {x.dtype} times {kind}: float32, bfloat16 and float16 are supported")
    if weight.shape[1] != x.shape[1] or not is_dense:
        raise ValueError(f"rows {tuple(x.shape)} times a weight {tuple(weight.shape)}, strides {strides}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        outputs = weight.shape[0]
        raise ValueError(f"a bias {tuple(bias.shape)} of {bias.dtype}, strides {bias.stride()}, to {outputs} outputs")
