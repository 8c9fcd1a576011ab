"""Random tensors, pools and the distance that rounding explains; tests nothing itself."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from tandem_kernels.contract import FLOAT8, FLOAT8_MAX, HeadNorms, LayerKV, SamplingRows

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}

ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The most by which rounding changes a number, relative to it."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to float8 in groups of 128, as float32."""
    groups = [group.float() for group in x.split(128, 1)]
    scales = [group.abs().amax(1, keepdim=True) / FLOAT8_MAX for group in groups]
    scales = [torch.where(scale > 0, scale, 1.0) for scale in scales]
    return torch.cat([(g / s).to(FLOAT8).float() * s for g, s in zip(groups, scales, strict=True)], 1)


def on(device: torch.device, value: LayerKV | HeadNorms | SamplingRows) -> LayerKV | HeadNorms | SamplingRows:
    """The same on another device; views become tensors of their own."""
    tensors = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)})


def pool_of(shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    """Random blocks `[N, G, L, 2, tile]` of `(N, G, L, B, D)`; float8 ones with scales, as bytes."""
    blocks, groups, layers, block_size, dim = shape
    if dtype != FLOAT8:
        return randn(blocks, groups, layers, 2, block_size, dim, dtype=dtype, seed=seed)
    # Bytes of finite numbers and of finite scales.
    generator = torch.Generator().manual_seed(seed)
    tile = block_size * (dim + 4)
    return torch.randint(0, 0x70, (blocks, groups, layers, 2, tile), generator=generator, dtype=torch.uint8)


def layer_of(pool: torch.Tensor, index: int, block_size: int, dim: int) -> LayerKV:
    """Layer `index` of `pool_of`, as strided views."""
    if pool.dtype != torch.uint8:
        return LayerKV(pool[:, :, index, 0], pool[:, :, index, 1])
    tiles = [pool[:, :, index, plane] for plane in range(2)]
    numbers = [tile[..., : block_size * dim].view(FLOAT8).unflatten(-1, (block_size, dim)) for tile in tiles]
    return LayerKV(*numbers, *(tile[..., block_size * dim :].view(torch.float32) for tile in tiles))


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, ulps: float, scale: torch.Tensor | None = None) -> None:
    """`got` lies within `ulps` steps of its type of the float64 numbers `exact`, steps taken at `scale` (default: at
    each number)."""
    assert got.shape == exact.shape
    info = torch.finfo(got.dtype)
    size = exact.abs() if scale is None else scale
    steps = (got.cpu().double() - exact).abs() / (size * info.eps + info.smallest_normal)
    assert not steps.numel() or float(steps.max()) <= ulps, f"off by {float(steps.max())} steps"
