"""Draws random weights that few bits hold exactly; tests nothing itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem_kernels.native.library import WeightFormat
from tandem_kernels.reference.int4 import Codes
from tandem_kernels.reference.linear_int8 import GROUP


def random_codes(n: int, k: int, seed: int = 4) -> Codes:
    """Each group has the least and the largest code, as a quantiser's groups do; one has a single number."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k // GROUP, GROUP), generator=generator, dtype=torch.uint8)
    codes[..., 3], codes[..., 17] = 0, 15
    codes[0, 0] = 0
    step = torch.rand((n, k // GROUP), generator=generator).half() / 8
    step[0, 0] = 0
    base = -7 * torch.rand((n, k // GROUP), generator=generator).half() / 8
    return Codes(codes.view(n, k), step, base)


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _eights(n: int, k: int) -> torch.Tensor:
    """As a file of 8-bit blocks would have them: the largest of each group is 127 steps."""
    values = (_random(n, k // 32, 32) * 40).round().clamp(-126, 126)
    values[..., 5] = 127
    return (values * (_random(n, k // 32, 1, seed=8).abs() + 0.01).half().float()).view(n, k)


WEIGHTS: dict[WeightFormat, Callable[[int, int], torch.Tensor]] = {
    WeightFormat.FOUR: lambda n, k: random_codes(n, k).floats(),
    WeightFormat.EIGHT: _eights,
    WeightFormat.BFLOAT: lambda n, k: _random(n, k).bfloat16().float(),
    WeightFormat.FLOAT: lambda n, k: _random(n, k),
}
"""By coding, random weights `[n, k]` for which it is the one of fewest bits."""
