"""Random weights that 4-bit codes hold exactly; tests nothing itself."""

from __future__ import annotations

import torch

from tandem_kernels.reference.codes import Codes
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
