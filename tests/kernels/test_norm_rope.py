"""Norm and rotary embedding against their formulas written another way."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.reference import rms_norm, rope, rope_tables


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn((3, 5, 32)).to(dtype), torch.randn(32).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-3)
    assert out.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_of_no_rows() -> None:
    assert rms_norm(torch.zeros((0, 8)), torch.ones(8), 1e-6).shape == (0, 8)


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    """As complex numbers: component i is real, i + D/2 imaginary, and position p turns them by p * frequency."""
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 17, 4000])
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16)
    x = torch.randn((4, 3, 16), dtype=torch.float64)
    cos, sin = rope_tables(positions, inv_freq, 1.0, torch.float64)
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.exp(1j * positions[:, None, None] * inv_freq.double())
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rope(x, cos, sin), expected, atol=1e-3, rtol=0)
    assert torch.equal(rope(x, cos, sin)[0], x[0])


def test_rope_scale_multiplies_both_tables() -> None:
    positions, inv_freq = torch.arange(5), torch.rand(4)
    plain = rope_tables(positions, inv_freq, 1.0, torch.float32)
    scaled = rope_tables(positions, inv_freq, 1.5, torch.float32)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one * 1.5, other)


def test_components_that_are_not_rotated_are_not_scaled() -> None:
    """As LongRoPE does with a part of a head: its frequencies of 0 leave the other components as they are."""
    cos, sin = rope_tables(torch.arange(5), torch.tensor([0.5, 0.25, 0.0]), 1.5, torch.float32)
    assert torch.equal(cos[:, 2::3], torch.ones(5, 2)) and torch.equal(sin[:, 2::3], torch.zeros(5, 2))
    assert torch.equal(cos[0], torch.tensor([1.5, 1.5, 1.0] * 2))
