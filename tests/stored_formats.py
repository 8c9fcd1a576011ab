"""Write weights as float8 numbers with scales, and read such numbers bit by bit, as their format defines them."""

from __future__ import annotations

from typing import Any

import torch

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 48],
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}
_LARGEST = 448.0


def quantise(weight: torch.Tensor, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 numbers of a matrix, and its scales."""
    rows, columns = config.get("weight_block_size") or (1, weight.shape[1])
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.view(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-6) / _LARGEST
    numbers = (blocks / scale[:, None, :, None]).view(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scale


def restored(numbers: torch.Tensor, scale: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Return the float32 values of a matrix, number by number from the bits."""
    rows, columns = config.get("weight_block_size") or (1, numbers.shape[1])
    bits = numbers.view(torch.uint8).tolist()
    return torch.tensor(
        [[_value(b) * float(scale[i // rows, j // columns]) for j, b in enumerate(row)] for i, row in enumerate(bits)]
    )


def _value(bits: int) -> float:
    """Return the number of an e4m3 byte: a sign, four bits of exponent with a bias of 7, three of fraction."""
    sign, exponent, fraction = -1.0 if bits >> 7 else 1.0, bits >> 3 & 15, bits & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
