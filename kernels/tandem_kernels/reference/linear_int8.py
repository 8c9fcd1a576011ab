"""Linear layers with int8 weights and int8 activations; owns no packing and never sees other layers.

Weights are symmetric per output channel or per group of a channel, activations symmetric per row and group of `GROUP`
components (as Q8_0 of ggml), so a row's result depends on nothing but the row. Products of a group are summed exactly,
as integers; groups are added in ascending order, each by one fused multiply-add in float32.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Components of a row that share a scale."""

LEVELS = 127
"""The largest quantised magnitude; -128 does not occur."""


def weight_group(k: int, limit: int) -> int:
    """The largest number of components of at most `limit` that may share a weight scale in channels of `k`.

    Raises ValueError when `k` is no multiple of `GROUP`.
    """
    _check_groups(k, GROUP)
    return max(group for group in range(GROUP, max(limit, GROUP) + 1, GROUP) if k % group == 0)


def quantize_weight(weight: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` `[n, k]` -> int8 values `[n, k]` and float32 scales `[n, k / group]`; None: one scale per channel.

    Rounds to nearest, ties to even. Raises ValueError when `group` is no multiple of `GROUP` that divides `k`, or a
    weight is not finite.
    """
    n, k = weight.shape
    group = group or k
    _check_groups(group, GROUP)
    _check_groups(k, group)
    wide = weight.to(torch.float32)
    if not wide.isfinite().all():
        raise ValueError("a weight is not finite")
    values, scales = _quantize(wide.reshape(n, k // group, group))
    return values.view(n, k), scales


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows `[m, k]` -> int8 values `[m, k]` and scales `[m, k / GROUP]`.

    A group that holds an infinity or a NaN gets zeros and a scale that is not finite, so its products are NaN.
    Raises ValueError when `k` is no multiple of `GROUP`.
    """
    m, k = x.shape
    _check_groups(k, GROUP)
    values, scales = _quantize(x.reshape(m, k // GROUP, GROUP))
    return values.view(m, k), scales


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`y[i, j] = sum over h of (scales[j, h] * sum over g in h of (row_scale[i, g] * dot(x[i, g], weight[j, g])))`
    `+ bias[j]`, where h are groups of weights and g groups of the row, in float32.

    `x` float32 `[m, k]`; `weight` and `scales` of `quantize_weight`. Sums start at zero and take groups in ascending
    order: `sum = fma(row_scale, dot, sum)` within h, then `total = fma(scale, sum, total)`.
    """
    group = weight.shape[1] // scales.shape[1]
    values, row_scales = quantize_rows(x)
    total = torch.zeros((len(x), len(weight)))
    for h, scale in enumerate(scales.T):
        inner = torch.zeros_like(total)
        for g in range(h * group // GROUP, (h + 1) * group // GROUP):
            part = slice(g * GROUP, (g + 1) * GROUP)
            # Sums of integers below 2**24 are exact in float32, whatever their order.
            dots = values[:, part].float() @ weight[:, part].float().T
            inner = fma(row_scales[:, g, None], dots, inner)
        total = fma(scale, inner, total)
    return total if bias is None else total + bias


def embed_int8(tokens: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows `tokens` of an embedding table, quantised as weights `[n, k]`, as float32 `[T, k]`."""
    grouped = weight[tokens].float().reshape(len(tokens), scales.shape[1], -1)
    return (grouped * scales[tokens, :, None]).flatten(1)


def _check_groups(k: int, group: int) -> None:
    if k % group or k < group:
        raise ValueError(f"int8 needs components in groups of {group}, got {k}")


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of `x` `[..., c]`, one scale for the last dimension."""
    scales = x.abs().amax(dim=-1) / LEVELS
    usable = ((scales > 0) & scales.isfinite())[..., None]
    # Scales of subnormal numbers are coarse, so that a quotient may pass LEVELS.
    quotients = torch.where(usable, x / scales[..., None], 0.0).round().clamp(-LEVELS, LEVELS)
    return quotients.to(torch.int8), scales


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` of float32 tensors, rounded once.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, 2008), because a second
    rounding of a sum rounded to nearest may be wrong.
    """
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    # Knuth's two-sum: `total + error` is the exact sum.
    shadow = total - product
    error = (product - (total - shadow)) + (wide - shadow)
    is_even = (total.view(torch.int64) & 1) == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float64)
    odd = torch.where((error.abs() > 0) & is_even, torch.nextafter(total, towards), total)
    return odd.to(torch.float32)
