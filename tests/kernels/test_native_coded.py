"""Weights in few bits are the floats that they stand for: the compiled product of both has the same bits."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.native.library import Into, Team, WeightFormat, embed, linear, matrix_of
from tandem_kernels.native.pack import gate_up_rows, pack_linear
from tandem_kernels.native.pack_int4 import pack_exact
from tandem_kernels.reference.int4 import Codes, find_codes, linear_codes
from tandem_kernels.reference.linear_int8 import GROUP, linear_int8, quantize_rows, quantize_weight
from tests.kernels.codes import WEIGHTS, random_codes

_ROWS = [1, 2, 4, 5, 13, 15, 29, 141, 300]
_SHAPES = [(1, 32), (33, 64), (96, 160), (130, 576), (40, 1600)]
"""The last is longer than what becomes floats at once."""


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_CODED = [coding for coding in WEIGHTS if coding is not WeightFormat.FLOAT]


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(2)


@pytest.mark.parametrize("coding", WEIGHTS)
@pytest.mark.parametrize(("n", "k"), _SHAPES)
def test_the_fewest_bits_that_hold_a_matrix_are_found(coding: WeightFormat, n: int, k: int) -> None:
    panels, scales = pack_exact(WEIGHTS[coding](n, k))
    assert matrix_of(panels, n, k, scales).coding == coding
    per_weight = {WeightFormat.FOUR: 0.625, WeightFormat.EIGHT: 1.125, WeightFormat.BFLOAT: 2, WeightFormat.FLOAT: 4}[
        coding
    ]
    held = panels.nbytes + (0 if scales is None else scales.nbytes)
    assert held == -(-n // 32) * 32 * k * per_weight


@pytest.mark.parametrize("coding", _CODED)
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("n", "k"), _SHAPES)
def test_products_have_the_bits_of_floats(team: Team, n: int, k: int, rows: int, coding: WeightFormat) -> None:
    weight, x, bias = WEIGHTS[coding](n, k), _random(rows, k, seed=5), _random(n, seed=6)
    panels, scales = pack_exact(weight)
    floats = pack_linear(weight)
    for into in (Into.STORE, Into.ADD):
        y = linear(team, x, matrix_of(panels, n, k, scales, bias), into, torch.ones(rows, n))
        assert torch.equal(y, linear(team, x, matrix_of(floats, n, k, bias=bias), into, torch.ones(rows, n)))


@pytest.mark.parametrize("coding", _CODED)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_gated_products_have_the_bits_of_floats(team: Team, rows: int, coding: WeightFormat) -> None:
    n, k = 40, 96
    weight = gate_up_rows(WEIGHTS[coding](n, k), WEIGHTS[coding](n, k).flip(0))
    panels, scales = pack_exact(weight)
    floats, x = pack_linear(weight), _random(rows, k, seed=5)
    y = linear(team, x, matrix_of(panels, 2 * n, k, scales), Into.SWIGLU, torch.empty(rows, n))
    assert torch.equal(y, linear(team, x, matrix_of(floats, 2 * n, k), Into.SWIGLU, torch.empty(rows, n)))


@pytest.mark.parametrize("coding", WEIGHTS)
def test_a_row_does_not_see_its_company_or_the_lanes(coding: WeightFormat) -> None:
    n, k, most = 130, 192, 160
    x, weight = _random(most, k), WEIGHTS[coding](n, k)
    panels, scales = pack_exact(weight)
    weights, alone = matrix_of(panels, n, k, scales), Team(1)
    one_by_one = torch.cat([linear(alone, row[None], weights, Into.STORE, torch.empty(1, n)) for row in x])
    for team in (alone, Team(2), Team(3)):
        for rows in (*range(1, 24), 71, most):
            for first in (0, most - rows):
                part = x[first : first + rows]
                y = linear(team, part, weights, Into.STORE, torch.empty(rows, n))
                assert torch.equal(y, one_by_one[first : first + rows]), (team, rows, first)


@pytest.mark.parametrize("coding", WEIGHTS)
def test_embeddings_are_unpacked_unchanged(coding: WeightFormat) -> None:
    weight = WEIGHTS[coding](70, 96)
    panels, scales = pack_exact(weight)
    tokens = torch.tensor([0, 31, 32, 69, 31])
    assert torch.equal(embed(matrix_of(panels, 70, 96, scales), tokens), weight[tokens])


@pytest.mark.parametrize("spoil", [1e-4, float("nan"), float("inf"), 1e6])
def test_one_number_that_codes_cannot_hold_keeps_the_floats(spoil: float) -> None:
    weight = random_codes(40, 64).floats()
    weight[7, 9] = weight[7, 9] + spoil
    assert find_codes(weight) is None
    panels, scales = pack_exact(weight)
    assert panels.dtype == torch.float32 and scales is None
    assert torch.equal(panels.nan_to_num(), pack_linear(weight).nan_to_num())


def test_rows_that_are_no_whole_groups_keep_their_floats() -> None:
    assert pack_exact(torch.full((4, 48), 0.1))[0].dtype == torch.float32


def test_codes_are_found_again() -> None:
    codes = random_codes(50, 96)
    found = find_codes(codes.floats())
    assert isinstance(found, Codes)
    assert torch.equal(found.codes, codes.codes) and torch.equal(found.step, codes.step)
    assert torch.equal(found.base, codes.base)


def test_products_of_codes_with_int8_rows_err_only_by_the_rows() -> None:
    """By half a step of a row's group at most, and less on average than with int8 weights."""
    codes, x = random_codes(64, 192), _random(40, 192)
    weight = codes.floats()
    exact = x.double() @ weight.double().T
    error = (linear_codes(x, codes) - exact).abs()
    half_steps = quantize_rows(x)[1].repeat_interleave(GROUP, dim=1) / 2
    assert (error <= half_steps.double() @ weight.abs().double().T * 1.001).all()
    assert error.mean() < (linear_int8(x, *quantize_weight(weight, 96)) - exact).abs().mean()
