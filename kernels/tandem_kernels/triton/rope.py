"""Normalise and rotate query and key heads, and write keys and values to paged KV, in one pass on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.contract import FLOAT8, HeadNorms, LayerKV
from tandem_kernels.triton.interpret import UNFUSED, float8_bits, inverse_rms, narrow, rounded_to, widen

# Largest head_dim -> heads of one program; and warps of a program.
_HEADS = {64: 16, 128: 8, 256: 4}
_WARPS = 4

_LARGEST: tl.constexpr = tl.constexpr(448.0)
_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _rope_cache_kernel(
    p_qkv,
    p_cos,
    p_sin,
    p_query_norm,
    p_key_norm,
    p_slots,
    p_query,
    p_key,
    p_value,
    p_key_scale,
    p_value_scale,
    row_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Process HEADS heads of one row, as two halves `[HEADS, HALF_BLOCK]` whose components are rotated in pairs."""
    HALF: tl.constexpr = DIM // 2
    dtype: tl.constexpr = p_qkv.dtype.element_ty
    i_row = tl.program_id(0).to(tl.int64)
    o_head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    o_half = tl.arange(0, HALF_BLOCK)[None, :]
    is_query = o_head < QUERY_HEADS
    is_key = (o_head >= QUERY_HEADS) & (o_head < QUERY_HEADS + KV_HEADS)
    is_value = (o_head >= QUERY_HEADS + KV_HEADS) & (o_head < QUERY_HEADS + 2 * KV_HEADS)
    m_half = o_half < HALF
    m_tile = (o_head < QUERY_HEADS + 2 * KV_HEADS) & m_half

    p_tile = p_qkv + i_row * row_stride + o_head * DIM + o_half
    # [HEADS, HALF_BLOCK]
    b_first = widen(tl.load(p_tile, mask=m_tile, other=0.0))
    # [HEADS, HALF_BLOCK]
    b_second = widen(tl.load(p_tile + HALF, mask=m_tile, other=0.0))

    b_first_normed, b_second_normed = b_first, b_second
    if HAS_NORMS:
        b_first_wide, b_second_wide = b_first.to(tl.float32), b_second.to(tl.float32)
        squares = tl.sum(b_first_wide * b_first_wide + b_second_wide * b_second_wide, axis=1)
        b_inverse = inverse_rms(squares, DIM, eps)[:, None]
        m_query, m_key = is_query & m_half, is_key & m_half
        # [HEADS, HALF_BLOCK]
        b_first_weight = widen(tl.load(p_query_norm + o_half, mask=m_query, other=0.0))
        b_first_weight += widen(tl.load(p_key_norm + o_half, mask=m_key, other=0.0))
        # [HEADS, HALF_BLOCK]
        b_second_weight = widen(tl.load(p_query_norm + HALF + o_half, mask=m_query, other=0.0))
        b_second_weight += widen(tl.load(p_key_norm + HALF + o_half, mask=m_key, other=0.0))
        b_first_normed = rounded_to((b_first_wide * b_inverse).to(b_first.dtype), dtype)
        b_first_normed = rounded_to(b_first_weight * b_first_normed, dtype)
        b_second_normed = rounded_to((b_second_wide * b_inverse).to(b_second.dtype), dtype)
        b_second_normed = rounded_to(b_second_weight * b_second_normed, dtype)

    # [1, HALF_BLOCK]: the tables repeat their halves.
    b_cos = widen(tl.load(p_cos + i_row * DIM + o_half, mask=m_half, other=0.0))
    # [1, HALF_BLOCK]
    b_sin = widen(tl.load(p_sin + i_row * DIM + o_half, mask=m_half, other=0.0))
    b_first_turned = rounded_to(b_first_normed * b_cos, dtype) - rounded_to(b_second_normed * b_sin, dtype)
    b_second_turned = rounded_to(b_second_normed * b_cos, dtype) + rounded_to(b_first_normed * b_sin, dtype)
    b_first = tl.where(is_value, b_first, rounded_to(b_first_turned, dtype))
    b_second = tl.where(is_value, b_second, rounded_to(b_second_turned, dtype))

    p_out = p_query + (i_row * QUERY_HEADS + o_head) * DIM + o_half
    tl.store(p_out, narrow(b_first, dtype), mask=is_query & m_half)
    tl.store(p_out + HALF, narrow(b_second, dtype), mask=is_query & m_half)

    slot = tl.load(p_slots + i_row)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        o_kv_head = tl.where(is_value, o_head - KV_HEADS, o_head) - QUERY_HEADS
        o_plane = block * block_stride + o_kv_head.to(tl.int64) * head_stride + offset * DIM + o_half
        if IS_SCALED:
            b_largest = tl.maximum(tl.max(tl.abs(b_first), axis=1), tl.max(tl.abs(b_second), axis=1)).to(tl.float32)
            b_scale = tl.div_rn(b_largest, tl.full(b_largest.shape, _LARGEST, tl.float32))
            b_scale = tl.where(b_scale < _TINY, 1.0, b_scale)[:, None]
            o_scale = block * scale_block_stride + o_kv_head.to(tl.int64) * scale_head_stride + offset
            tl.store(p_key_scale + o_scale, b_scale, mask=is_key)
            tl.store(p_value_scale + o_scale, b_scale, mask=is_value)
            b_scale = tl.broadcast_to(b_scale, [HEADS, HALF_BLOCK])
            b_first_bits = float8_bits(tl.div_rn(b_first.to(tl.float32), b_scale))
            b_second_bits = float8_bits(tl.div_rn(b_second.to(tl.float32), b_scale))
        else:
            b_first_bits, b_second_bits = narrow(b_first, dtype), narrow(b_second, dtype)
        tl.store(p_key + o_plane, b_first_bits, mask=is_key & m_half)
        tl.store(p_key + o_plane + HALF, b_second_bits, mask=is_key & m_half)
        tl.store(p_value + o_plane, b_first_bits, mask=is_value & m_half)
        tl.store(p_value + o_plane + HALF, b_second_bits, mask=is_value & m_half)


def rope_cache_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: LayerKV,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Normalise (unless `norms` is None) and rotate the query and key heads in `qkv`, write keys and values to `slots`
    of the pool, and return the queries `[T, H, D]`. The exact result is defined in `tandem_kernels.contract`."""
    rows = len(qkv)
    _, kv_heads, block_size, dim = kv.key.shape
    num_heads = qkv.shape[1] // dim
    query = torch.empty((rows, num_heads - 2 * kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return query
    is_scaled = kv.key_scale is not None
    # Float8 planes are written as bytes, because not every GPU supports the type.
    key, value = (p.view(torch.uint8) if p.dtype == FLOAT8 else p for p in (kv.key, kv.value))
    scale_strides = kv.key_scale.stride()[:2] if kv.key_scale is not None else (0, 0)
    heads = next((heads for most, heads in _HEADS.items() if dim <= most), None)
    if heads is None:
        raise ValueError(f"heads of {dim} numbers: rope_cache_write takes at most {max(_HEADS)}")
    _rope_cache_kernel[(rows, triton.cdiv(num_heads, heads))](
        qkv,
        cos,
        sin,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        slots,
        query,
        key,
        value,
        kv.key_scale,
        kv.value_scale,
        qkv.stride(0),
        *key.stride()[:2],
        *scale_strides,
        0.0 if norms is None else norms.eps,
        QUERY_HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        HAS_NORMS=norms is not None,
        IS_SCALED=is_scaled,
        num_warps=_WARPS,
        **UNFUSED,
    )
    return query
