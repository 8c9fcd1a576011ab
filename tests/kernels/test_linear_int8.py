"""The meaning of int8 linear layers: quantisation is nearest and bounded, groups are independent, sums are exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tandem_kernels.reference.linear_int8 import (
    GROUP,
    LEVELS,
    fma,
    linear_int8,
    quantize_rows,
    quantize_weight,
    weight_group,
)
from tests.kernels.codes import randn


@pytest.mark.parametrize("group", [None, 32, 64, 192])
def test_a_weight_is_off_by_half_a_step_at_most(group: int | None) -> None:
    weight = randn(37, 192) * randn(37, 1).exp()
    values, scales = quantize_weight(weight, group)
    assert values.dtype == torch.int8 and values.abs().max() == LEVELS
    assert scales.shape == (37, 192 // (group or 192))
    steps = scales.repeat_interleave(group or 192, dim=1)
    # Half a step, and the rounding of the quotient.
    assert ((values * steps - weight).abs() <= steps * 0.50001).all()
    assert (values.unflatten(1, (scales.shape[1], -1)).abs().amax(-1) == LEVELS).all(), "the largest uses all levels"


def test_rows_are_quantised_in_groups_of_their_own() -> None:
    x = randn(5, 96)
    x[1, 32:64] *= 1000
    values, scales = quantize_rows(x)
    for group in range(3):
        part = slice(GROUP * group, GROUP * (group + 1))
        alone, scale = quantize_rows(x[:, part].contiguous())
        assert torch.equal(values[:, part], alone)
        assert torch.equal(scales[:, group], scale[:, 0])
        assert torch.equal(scale[:, 0], x[:, part].abs().amax(1) / LEVELS)


def test_ties_go_to_even() -> None:
    x = torch.zeros(1, GROUP)
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -3.5])
    assert quantize_rows(x)[0][0, :5].tolist() == [127, 0, 2, -2, -4]


@pytest.mark.parametrize("largest", [0.0, 1e-45, 5e-44, 2.6e-43, 1e-40, 3e38])
def test_tiny_and_huge_numbers_stay_in_range(largest: float) -> None:
    x = torch.full((1, GROUP), largest)
    x[0, 1] = -largest
    values, scales = quantize_rows(x)
    assert values.abs().max() <= LEVELS and values[0, 1] == -values[0, 0]
    assert (values.bool().any() and scales.isfinite().all()) or scales.item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_row_only(bad: float) -> None:
    x, weight = randn(4, 64), randn(9, 64)
    clean = linear_int8(x, *quantize_weight(weight))
    x[2, 40] = bad
    y = linear_int8(x, *quantize_weight(weight))
    assert y[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("group", [None, 32, 96])
def test_linear_is_the_product_of_what_was_quantised(group: int | None) -> None:
    x, weight, bias = randn(6, 192) * 3, randn(50, 192, seed=4), randn(50, seed=5)
    values, scales = quantize_weight(weight, group)
    rows, row_scales = quantize_rows(x)
    dense_x = rows.double() * row_scales.double().repeat_interleave(GROUP, 1)
    dense_w = values.double() * scales.double().repeat_interleave(group or 192, 1)
    y = linear_int8(x, values, scales, bias)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), dense_x @ dense_w.T + bias, rtol=1e-5, atol=1e-5)
    # It is near the product of the weights themselves too: 8 bits leave about one percent.
    exact = x @ weight.T + bias
    assert (y - exact).norm() < 0.02 * exact.norm()


def test_sums_are_fused_and_ascending() -> None:
    """Against exact fractions, rounded once per group."""
    x, weight = randn(2, 96) * 100, randn(3, 96, seed=4)
    values, scales = quantize_weight(weight, 32)
    rows, row_scales = quantize_rows(x)
    y = linear_int8(x, values, scales)
    for i in range(2):
        for j in range(3):
            total = 0.0
            for g in range(3):
                part = slice(32 * g, 32 * (g + 1))
                dot = int((rows[i, part].long() * values[j, part].long()).sum())
                inner = _nearest(Fraction(row_scales[i, g].item()) * dot)
                total = _nearest(Fraction(scales[j, g].item()) * Fraction(inner) + Fraction(total))
            assert y[i, j].item() == total


def test_fma_rounds_once() -> None:
    """Sums that lie beside the middle of two floats, by less than float64 can see."""
    a, b = torch.tensor([1 + 2.0**-12, 1.0]), torch.tensor([1 + 2.0**-12, 1 + 2.0**-23])
    c = torch.tensor([2.0**-60, -(2.0**-60)])
    c = torch.cat([c, randn(500) * 1e-3])
    a, b = torch.cat([a, randn(500, seed=5)]), torch.cat([b, randn(500, seed=6)])
    expected = [
        _nearest(Fraction(p) * Fraction(q) + Fraction(r))
        for p, q, r in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert fma(a, b, c).tolist() == expected
    # The first is a tie without the smallest term, so rounding twice would lose it.
    middle = (a[:1].double() * b[:1].double() + c[:1].double()).float()
    assert middle.item() != expected[0]


def _nearest(exact: Fraction) -> float:
    """The float32 nearest to `exact`, ties to even, by comparing neighbours."""
    guess = torch.tensor(float(exact), dtype=torch.float32)
    below, above = (torch.nextafter(guess, torch.tensor(s * torch.inf)) for s in (-1.0, 1.0))
    return min(
        (guess, below, above), key=lambda f: (abs(Fraction(f.item()) - exact), f.view(torch.int32).item() & 1)
    ).item()


@pytest.mark.parametrize("k", [0, 16, 33, 100])
def test_sizes_without_groups_are_refused(k: int) -> None:
    for quantize in (quantize_weight, quantize_rows):
        with pytest.raises(ValueError, match="groups of 32"):
            quantize(torch.ones(2, k))
    with pytest.raises(ValueError, match="groups of 32"):
        weight_group(k, 192)


@pytest.mark.parametrize("group", [31, 48, 128, 384])
def test_groups_that_do_not_divide_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match="groups of"):
        quantize_weight(torch.ones(2, 192), group)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        quantize_weight(torch.tensor([[float("nan")] * 32]))


@pytest.mark.parametrize(("k", "limit", "group"), [(576, 192, 192), (1536, 192, 192), (896, 192, 128), (4096, 32, 32)])
def test_weight_group_divides(k: int, limit: int, group: int) -> None:
    assert weight_group(k, limit) == group
