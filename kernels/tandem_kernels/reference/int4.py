"""Represent weights exactly as 4-bit codes, and multiply them with int8 rows.

A group of `GROUP` components of a channel is `step * code + base` with `step` and `base` in half precision, like blocks
of ggml's Q4_0 and Q4_1. The product of step and code has at most 15 bits, so only the addition is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.reference.linear_int8 import GROUP, fma, quantize_rows

_LARGEST = 15


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight matrix `[n, k]` stored as 4-bit codes, whose values are `step * code + base`.

    `codes`: uint8 `[n, k]`, each below 16. `step`, `base`: float16 `[n, k / GROUP]`, shared by a group of a row.
    """

    codes: torch.Tensor
    step: torch.Tensor
    base: torch.Tensor

    def floats(self) -> torch.Tensor:
        """Return the weights as float32 `[n, k]`."""
        groups = self.codes.view(len(self.codes), -1, GROUP).float()
        return (self.step.float()[..., None] * groups + self.base.float()[..., None]).flatten(1)


def find_codes(weight: torch.Tensor) -> Codes | None:
    """Return 4-bit codes that represent float32 `weight` `[n, k]` exactly; None if there are none.

    `base` and `step` of a group follow from its least and greatest weight, as quantisers choose them; only these are
    tried.
    """
    n, k = weight.shape
    if k % GROUP:
        return None
    groups = weight.reshape(n, k // GROUP, GROUP)
    base, top = groups.aminmax(dim=-1)
    step = ((top - base) / _LARGEST).half()
    divisor = step.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = ((groups - base[..., None]) / divisor[..., None]).round().clamp(0, _LARGEST)
    found = Codes(codes.nan_to_num().to(torch.uint8).view(n, k), step, base.half())
    return found if torch.equal(found.floats(), weight) else None


def linear_codes(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply float32 rows `x`, quantised as in `linear_int8`, with coded weights.

    `y[i, j] = sum over g of row_scale[i, g] * (step[j, g] * dot(x[i, g], code[j, g]) + base[j, g] * sum(x[i, g]))`
    `+ bias[j]` in float32. Sums start at zero and add groups in ascending order:
    `total = fma(row_scale, fma(step, dot, base * sum), total)`.
    """
    values, row_scales = quantize_rows(x)
    total = torch.zeros((len(x), len(weight.codes)))
    step, base = weight.step.float(), weight.base.float()
    for g in range(row_scales.shape[1]):
        part = slice(g * GROUP, (g + 1) * GROUP)
        row = values[:, part].float()
        # Integers below 2**24, and products of one with a float16, are exact in float32 in any order.
        dots, sums = row @ weight.codes[:, part].float().T, row.sum(dim=1, keepdim=True)
        value = fma(step[:, g], dots, base[:, g] * sums)
        total = fma(row_scales[:, g, None], value, total)
    return total if bias is None else total + bias
