"""Compute linear layers with int8 weights and int8 activations.

Weights are quantised symmetrically per output channel or per group of a channel, activations per row and group of
`GROUP` components (like ggml's Q8_0), so a row's result does not depend on other rows. Products of a group are summed
exactly, as integers; groups are added in ascending order, each by one fused multiply-add in float32.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Components of a row that share a scale."""

LEVELS = 127
"""Largest quantised magnitude; -128 does not occur."""


def weight_group(k: int, limit: int) -> int:
    """Return the largest size, up to `limit`, of groups that share a weight scale in channels of `k` components.

    Raises ValueError when `k` is not a multiple of `GROUP`.
    """
    _check_groups(k, GROUP)
    return max(group for group in range(GROUP, max(limit, GROUP) + 1, GROUP) if k % group == 0)


def quantize_weight(weight: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `weight` `[n, k]` to int8 values `[n, k]` and float32 scales `[n, k / group]`, and return both.

    `group`: successive components of an output channel that share a scale; None for one scale per channel. Rounds to
    nearest, ties to even. Raises ValueError when `group` is not a multiple of `GROUP` that divides `k`, or a weight is
    not finite.
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
    """Quantise float32 rows `[m, k]` to int8 values `[m, k]` and scales `[m, k / GROUP]`.

    A group that holds an infinity or a NaN gets zeros and a scale that is not finite, so its products are NaN.
    Raises ValueError when `k` is not a multiple of `GROUP`.
    """
    m, k = x.shape
    _check_groups(k, GROUP)
    values, scales = _quantize(x.reshape(m, k // GROUP, GROUP))
    return values.view(m, k), scales


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply float32 rows `x` `[m, k]`, quantised by `quantize_rows`, with weights from `quantize_weight`.

    `y[i, j] = sum over h of (scales[j, h] * sum over g in h of (row_scale[i, g] * dot(x[i, g], weight[j, g])))`
    `+ bias[j]` in float32, where h are groups of weights and g groups of the row. Sums start at zero and add groups in
    ascending order: `sum = fma(row_scale, dot, sum)` within h, then `total = fma(scale, sum, total)`.
    """
    group = weight.shape[1] // scales.shape[1]
    values, row_scales = quantize_rows(x)
    total = torch.zeros((len(x), len(weight)))
    for h, scale in enumerate(scales.T):
        inner = torch.zeros_like(total)
        for g in range(h * group // GROUP, (h + 1) * group // GROUP):
            part = slice(g * GROUP, (g + 1) * GROUP)
            # Sums of integers below 2**24 are exact in float32 in any order.
            dots = values[:, part].float() @ weight[:, part].float().T
            inner = fma(row_scales[:, g, None], dots, inner)
        total = fma(scale, inner, total)
    return total if bias is None else total + bias


def _check_groups(k: int, group: int) -> None:
    if k % group or k < group:
        raise ValueError(f"int8 needs components in groups of {group}, got {k}")


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x` `[..., c]` to int8 values and scales `[...]`, one scale for the last dimension."""
    scales = x.abs().amax(dim=-1) / LEVELS
    usable = ((scales > 0) & scales.isfinite())[..., None]
    # Subnormal scales are coarse, so a quotient may exceed LEVELS.
    quotients = torch.where(usable, x / scales[..., None], 0.0).round().clamp(-LEVELS, LEVELS)
    return quotients.to(torch.int8), scales


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Compute `a * b + c` of float32 tensors with a single rounding.

    The product is exact in float64. The float64 sum is rounded to odd (Boldo and Melquiond, 2008), because rounding it
    to nearest first would make the final rounding to float32 a double rounding.
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
