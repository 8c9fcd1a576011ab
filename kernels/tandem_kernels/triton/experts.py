"""Compute mixtures of experts: products of rows with the weights of their experts.

A *place* is a pair of a row and one of its experts. Places are sorted by expert, and a tile has places of one expert.
How many tiles an expert needs is known on the device alone. So the grid has as many as any choice could need, programs
beyond the last tile end at once, and nothing waits for the host: the call can be captured in a CUDA graph.

A row's result has the same operations whatever other rows are in the call, if the tiles do not depend on their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.triton.attention_tile import FUSED
from tandem_kernels.triton.interpret import UNFUSED, narrow, rounded_to, widen
from tandem_kernels.triton.linear import LinearTiles
from tandem_kernels.triton.product import add_product, arguments_of, inputs_per_tile, row_tile

FEW, MANY = "few", "many"
TILES = {
    # (rows per expert, bytes of an element of a product's operands)
    (FEW, 1): LinearTiles(16, 64, 64, 4, 4),
    (MANY, 1): LinearTiles(64, 32, 64, 4, 3),
    (FEW, 2): LinearTiles(16, 64, 64, 4, 4),
    (MANY, 2): LinearTiles(64, 64, 64, 4, 3),
    (FEW, 4): LinearTiles(16, 32, 32, 4, 3),
    (MANY, 4): LinearTiles(32, 32, 32, 4, 3),
}
"""Chosen by the compiled code for sm_90 (registers, spills, shared memory), not yet by measured time."""

_MANY_PLACES = 16
"""Least mean number of places of an expert for tiles of many."""
_SUM_BLOCK = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Tiles(NamedTuple):
    """Places of all tiles. `order`: index of the place that is at each position after sorting. `experts`, `begins`,
    `ends`: the expert of each tile, E beyond the last one, and the positions that the tile has."""

    order: torch.Tensor
    experts: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor


def _divide(chosen: torch.Tensor, num_experts: int, block_m: int) -> _Tiles:
    """Divide places into tiles. `chosen`: the expert of each place, -1 for those of other ranks, which are in no
    tile."""
    num_places, device = len(chosen), chosen.device
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, chosen + 1, torch.ones_like(chosen))
    stops = counts.cumsum(0)
    begins, counts = stops[:-1], counts[1:]
    tiles = (counts + block_m - 1) // block_m
    last_tiles = tiles.cumsum(0)
    numbers = torch.arange(num_places // block_m + min(num_places, num_experts), device=device)
    experts = torch.searchsorted(last_tiles, numbers, right=True)
    known = experts.clamp(max=num_experts - 1)
    first = begins[known] + (numbers - (last_tiles - tiles)[known]) * block_m
    return _Tiles(chosen.argsort(stable=True), experts, first, begins[known] + counts[known])


@triton.jit
def _gate_up_kernel(
    p_out,  # [places, INNER], places in the order of `p_order`
    # From p_x to `scales`, and FORM: the fields of `ProductArguments`.
    p_x,  # [rows, INPUTS]
    p_x_scales,
    p_weight,  # [EXPERTS, 2 * INNER, INPUTS]
    scales,
    p_order,
    p_experts,
    p_begins,
    p_ends,
    FORM: tl.constexpr,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_tile = tl.program_id(0) // tl.cdiv(INNER, BLOCK_N)
    o_inner = tl.program_id(0) % tl.cdiv(INNER, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_inner = o_inner < INNER
    expert = tl.load(p_experts + i_tile)
    if expert < EXPERTS:
        o_places = tl.load(p_begins + i_tile) + tl.arange(0, BLOCK_M)
        m_places = o_places < tl.load(p_ends + i_tile)
        rows = tl.load(p_order + o_places, mask=m_places, other=0) // CHOSEN
        o_gate = expert * 2 * INNER + o_inner
        b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dtype: tl.constexpr = p_out.dtype.element_ty
        for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
            b_x, b_scales = row_tile(p_x, p_x_scales, rows, m_places, start, FORM, INPUTS, BLOCK_K)
            b_gate = add_product(
                b_gate, b_x, b_scales, p_weight, scales, o_gate, m_inner, start, FORM, INPUTS, BLOCK_K, dtype
            )
            b_up = add_product(
                b_up, b_x, b_scales, p_weight, scales, o_gate + INNER, m_inner, start, FORM, INPUTS, BLOCK_K, dtype
            )
        # As `linear` and `silu_mul` round.
        b_gate, b_up = rounded_to(b_gate, dtype), rounded_to(b_up, dtype)
        b_silu = tl.div_rn(b_gate, 1.0 + tl.exp(-b_gate))
        p_tile = p_out + o_places[:, None] * INNER + o_inner[None, :]
        tl.store(p_tile, narrow(rounded_to(b_silu, dtype) * b_up, dtype), mask=m_places[:, None] & m_inner[None, :])


@triton.jit
def _down_kernel(
    p_out,  # [places, OUTPUTS], places row by row
    # From p_inner to `scales`, and FORM: the fields of `ProductArguments`.
    p_inner,  # [places, INNER], places in the order of `p_order`
    p_inner_scales,
    p_weight,  # [EXPERTS, OUTPUTS, INNER]
    scales,
    p_factors,  # [places], places row by row
    p_order,
    p_experts,
    p_begins,
    p_ends,
    FORM: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_tile = tl.program_id(0) // tl.cdiv(OUTPUTS, BLOCK_N)
    o_outputs = tl.program_id(0) % tl.cdiv(OUTPUTS, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_outputs = o_outputs < OUTPUTS
    expert = tl.load(p_experts + i_tile)
    if expert < EXPERTS:
        o_places = tl.load(p_begins + i_tile) + tl.arange(0, BLOCK_M)
        m_places = o_places < tl.load(p_ends + i_tile)
        places = tl.load(p_order + o_places, mask=m_places, other=0)
        o_weights = expert * OUTPUTS + o_outputs
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dtype: tl.constexpr = p_out.dtype.element_ty
        for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
            b_x, b_scales = row_tile(p_inner, p_inner_scales, o_places, m_places, start, FORM, INNER, BLOCK_K)
            b_acc = add_product(
                b_acc, b_x, b_scales, p_weight, scales, o_weights, m_outputs, start, FORM, INNER, BLOCK_K, dtype
            )
        b_factors = widen(tl.load(p_factors + places, mask=m_places, other=0.0))
        b_part = rounded_to(b_acc, dtype) * b_factors[:, None]
        p_tile = p_out + places[:, None] * OUTPUTS + o_outputs[None, :]
        tl.store(p_tile, narrow(b_part, dtype), mask=m_places[:, None] & m_outputs[None, :])


@triton.jit
def _sum_kernel(p_out, p_parts, p_chosen, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_total = tl.zeros([BLOCK], tl.float32)
    for i_place in range(CHOSEN):
        # What other ranks compute was not written here.
        width = tl.where(tl.load(p_chosen + i_row * CHOSEN + i_place) >= 0, WIDTH, 0)
        p_part = p_parts + (i_row * CHOSEN + i_place) * WIDTH + o_out
        b_total = rounded_to(b_total + widen(tl.load(p_part, mask=o_out < width, other=0.0)), dtype)
    tl.store(p_out + i_row * WIDTH + o_out, narrow(b_total, dtype), mask=o_out < WIDTH)


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | DeviceCodes,
    down: torch.Tensor | DeviceCodes,
    *,
    is_batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts. The exact result is defined in `tandem_kernels.contract`.

    `is_batch_invariant`: use tiles that do not depend on the number of rows. Raises ValueError when dtypes or strides
    are not supported."""
    (num_rows, width), num_chosen = x.shape, experts.shape[1]
    num_experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    _check(x, gate_up, down)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    num_places = num_rows * num_chosen
    is_many = not is_batch_invariant and num_places >= _MANY_PLACES * num_experts
    is_float8 = isinstance(gate_up, DeviceCodes) and gate_up.rounds_rows
    tiles = TILES[MANY if is_many else FEW, 1 if is_float8 else x.element_size()]
    chosen = experts.flatten()
    places = _divide(chosen, num_experts, tiles.block_m)
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STAGES": tiles.stages}
    options = {"num_warps": tiles.warps, **FUSED}
    between = torch.empty((num_places, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_places, width), dtype=x.dtype, device=x.device)
    num_tiles = len(places.experts)
    *arguments, form = arguments_of(x.contiguous(), gate_up)
    _gate_up_kernel[(num_tiles * triton.cdiv(inner, tiles.block_n),)](
        between, *arguments, *places,
        FORM=form, CHOSEN=num_chosen, EXPERTS=num_experts, INPUTS=width, INNER=inner,
        BLOCK_K=inputs_per_tile(gate_up, tiles.block_k), **blocks, **options,
    )  # fmt: skip
    *arguments, form = arguments_of(between, down)
    _down_kernel[(num_tiles * triton.cdiv(width, tiles.block_n),)](
        parts, *arguments, weights.contiguous(), *places,
        FORM=form, EXPERTS=num_experts, INNER=inner, OUTPUTS=width,
        BLOCK_K=inputs_per_tile(down, tiles.block_k), **blocks, **options,
    )  # fmt: skip
    _sum_kernel[(num_rows, triton.cdiv(width, _SUM_BLOCK))](
        out, parts, chosen, CHOSEN=num_chosen, WIDTH=width, BLOCK=_SUM_BLOCK, **UNFUSED
    )
    return out


def _check(x: torch.Tensor, gate_up: torch.Tensor | DeviceCodes, down: torch.Tensor | DeviceCodes) -> None:
    floats = [matrices for matrices in (gate_up, down) if isinstance(matrices, torch.Tensor)]
    if x.dtype not in _DTYPES or any(matrices.dtype != x.dtype for matrices in floats):
        kinds = " and ".join(str(matrices.dtype) for matrices in floats) or "codes"
        raise ValueError(f"rows of {x.dtype} times {kinds}: float32, bfloat16 and float16 are supported")
    if gate_up.shape[2] != x.shape[1] or not all(matrices.is_contiguous() for matrices in floats):
        strides = [matrices.stride() for matrices in floats]
        raise ValueError(f"rows {tuple(x.shape)} times {tuple(gate_up.shape)}, strides {strides}")
