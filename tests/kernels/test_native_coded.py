"""Weights in few bits are the floats that they stand for: the compiled product of both has the same bits."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p

import pytest
import torch

from tandem_kernels.native.library import Coding, Into, Team, embed, linear, matrix_of
from tandem_kernels.native.pack import gate_up_rows, pack_linear
from tandem_kernels.native.pack_coded import pack_exact
from tandem_kernels.reference.codes import Codes, find_codes, linear_codes
from tandem_kernels.reference.linear_int8 import GROUP, linear_int8, quantize_rows, quantize_weight
from tests.kernels.builds import WIDTHS, compile_each
from tests.kernels.codes import random_codes

_ROWS = [1, 2, 4, 5, 13, 15, 29, 141, 300]
_SHAPES = [(1, 32), (33, 64), (96, 160), (130, 576), (40, 1600)]
"""The last is longer than what becomes floats at once."""


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _eights(n: int, k: int) -> torch.Tensor:
    """As a file of 8-bit blocks would have them: the largest of each group is 127 steps."""
    values = (_random(n, k // 32, 32) * 40).round().clamp(-126, 126)
    values[..., 5] = 127
    return (values * (_random(n, k // 32, 1, seed=8).abs() + 0.01).half().float()).view(n, k)


_WEIGHTS = {
    Coding.FOUR: lambda n, k: random_codes(n, k).floats(),
    Coding.EIGHT: _eights,
    Coding.BFLOAT: lambda n, k: _random(n, k).bfloat16().float(),
    Coding.FLOAT: lambda n, k: _random(n, k),
}
_CODED = [coding for coding in _WEIGHTS if coding is not Coding.FLOAT]


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(2)


@pytest.mark.parametrize("coding", _WEIGHTS)
@pytest.mark.parametrize(("n", "k"), _SHAPES)
def test_the_fewest_bits_that_hold_a_matrix_are_found(coding: Coding, n: int, k: int) -> None:
    panels, scales = pack_exact(_WEIGHTS[coding](n, k))
    assert matrix_of(panels, n, k, scales).coding == coding
    per_weight = {Coding.FOUR: 0.625, Coding.EIGHT: 1.125, Coding.BFLOAT: 2, Coding.FLOAT: 4}[coding]
    held = panels.nbytes + (0 if scales is None else scales.nbytes)
    assert held == -(-n // 32) * 32 * k * per_weight


@pytest.mark.parametrize("coding", _CODED)
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("n", "k"), _SHAPES)
def test_products_have_the_bits_of_floats(team: Team, n: int, k: int, rows: int, coding: Coding) -> None:
    weight, x, bias = _WEIGHTS[coding](n, k), _random(rows, k, seed=5), _random(n, seed=6)
    panels, scales = pack_exact(weight)
    floats = pack_linear(weight)
    for into in (Into.STORE, Into.ADD):
        y = linear(team, x, matrix_of(panels, n, k, scales, bias), into, torch.ones(rows, n))
        assert torch.equal(y, linear(team, x, matrix_of(floats, n, k, bias=bias), into, torch.ones(rows, n)))


@pytest.mark.parametrize("coding", _CODED)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_gated_products_have_the_bits_of_floats(team: Team, rows: int, coding: Coding) -> None:
    n, k = 40, 96
    weight = gate_up_rows(_WEIGHTS[coding](n, k), _WEIGHTS[coding](n, k).flip(0))
    panels, scales = pack_exact(weight)
    floats, x = pack_linear(weight), _random(rows, k, seed=5)
    y = linear(team, x, matrix_of(panels, 2 * n, k, scales), Into.SWIGLU, torch.empty(rows, n))
    assert torch.equal(y, linear(team, x, matrix_of(floats, 2 * n, k), Into.SWIGLU, torch.empty(rows, n)))


@pytest.mark.parametrize("coding", _WEIGHTS)
def test_a_row_does_not_see_its_company_or_the_lanes(coding: Coding) -> None:
    n, k, most = 130, 192, 160
    x, weight = _random(most, k), _WEIGHTS[coding](n, k)
    panels, scales = pack_exact(weight)
    weights, alone = matrix_of(panels, n, k, scales), Team(1)
    one_by_one = torch.cat([linear(alone, row[None], weights, Into.STORE, torch.empty(1, n)) for row in x])
    for team in (alone, Team(2), Team(3)):
        for rows in (*range(1, 24), 71, most):
            for first in (0, most - rows):
                part = x[first : first + rows]
                y = linear(team, part, weights, Into.STORE, torch.empty(rows, n))
                assert torch.equal(y, one_by_one[first : first + rows]), (team, rows, first)


@pytest.mark.parametrize("coding", _WEIGHTS)
def test_embeddings_come_back(coding: Coding) -> None:
    weight = _WEIGHTS[coding](70, 96)
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


_ENTRY = """
#include "linear.hpp"
using namespace tandem;
extern "C" int width() { return kWidth; }
extern "C" void multiply(const float* x, int m, int coding, const void* panels, const float* scales, int n, int k,
                         float* y) {
    Team team(2);
    const Matrix w{static_cast<Coding>(coding), panels, scales, nullptr, n, k, 32};
    team.run([&](Lane& lane) { linear(lane, x, k, m, w, y, n, Into::kStore); });
}
extern "C" void embed(int coding, const void* panels, const float* scales, int n, int k, int token, float* out) {
    embed_row({static_cast<Coding>(coding), panels, scales, nullptr, n, k, 32}, token, out);
}
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """For the machine's vectors and for each narrower kind, down to plain loops."""
    found = compile_each(_ENTRY, WIDTHS, tmp_path_factory.mktemp("builds"))
    return [ctypes.CDLL(str(path)) for path in found.values()]


@pytest.mark.slow  # compiles the product several times
@pytest.mark.parametrize("coding", _CODED)
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 33])
def test_instructions_do_not_show(builds: list[ctypes.CDLL], team: Team, rows: int, coding: Coding) -> None:
    n, k = 96, 192
    x, weight = _random(rows, k, seed=5), _WEIGHTS[coding](n, k)
    panels, scales = pack_exact(weight)
    expected = linear(team, x, matrix_of(pack_linear(weight), n, k), Into.STORE, torch.empty(rows, n))
    for library in builds:
        y, row = torch.empty(rows, n), torch.empty(k)
        matrix = (c_int(int(coding)), _pointer(panels), _pointer(scales))
        library.multiply(_pointer(x), c_int(rows), *matrix, c_int(n), c_int(k), _pointer(y))
        assert torch.equal(y, expected), library.width()
        library.embed(*matrix, c_int(n), c_int(k), c_int(37), _pointer(row))
        assert torch.equal(row, weight[37])


def _pointer(tensor: torch.Tensor | None) -> c_void_p | None:
    return None if tensor is None else c_void_p(tensor.data_ptr())
