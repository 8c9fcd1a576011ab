"""The compiled product equals the exact one, and its bits do not depend on company, lanes or strides."""

from __future__ import annotations

from ctypes import byref

import pytest
import torch

from tandem_kernels.native.library import Into, Team, linear, load, matrix_of
from tandem_kernels.native.pack import gate_up_rows, pack_linear, unpack_linear
from tandem_kernels.native.pack_codes import PackedMatrix
from tests.kernels.codes import randn

_EPSILON = 2.0**-24
_SHAPES = [(1, 1), (32, 16), (33, 7), (95, 577), (576, 576), (1003, 130)]
_ROWS = [0, 1, 2, 5, 13, 15, 29, 64, 141]


def _multiply(
    team: Team,
    x: torch.Tensor,
    panels: torch.Tensor,
    n: int,
    into: Into,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """All of the library's arguments: `x` and `y` may have rows farther apart than they are long."""
    spec = matrix_of(PackedMatrix(panels), n, panels.shape[1], bias=bias)
    load().tandem_linear(team.handle, x.data_ptr(), x.stride(0), len(x), byref(spec), y.data_ptr(), y.stride(0), into)
    return y


def _worst_error(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Bound of a chain of k roundings (Higham, Accuracy and Stability, 3.1), with two more for bias and addition."""
    return (weight.shape[1] + 2) * _EPSILON * (x.abs().double() @ weight.abs().double().T + 10)


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("n", "k"), _SHAPES)
def test_store_and_add_are_the_exact_product(team: Team, n: int, k: int, rows: int) -> None:
    x, weight, bias, before = randn(rows, k), randn(n, k, seed=4), randn(n, seed=5), randn(rows, n, seed=6)
    panels, bound = pack_linear(weight), _worst_error(x, weight)
    exact = x.double() @ weight.double().T
    assert (
        (linear(team, x, matrix_of(PackedMatrix(panels), n, k), Into.STORE, before.clone()) - exact).abs() <= bound
    ).all()
    stored = _multiply(team, x, panels, n, Into.STORE, before.clone(), bias)
    assert ((stored - (exact + bias)).abs() <= bound).all()
    added = _multiply(team, x, panels, n, Into.ADD, before.clone(), bias)
    assert torch.equal(added, before + stored), "the sum first, then the bias, then one addition"


@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize(("n", "k"), [(1, 3), (16, 16), (24, 65), (1536, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up(team: Team, n: int, k: int, rows: int, has_bias: bool) -> None:
    x, gate, up = randn(rows, k), randn(n, k, seed=4), randn(n, k, seed=5)
    gate_bias, up_bias = randn(n, seed=6) * has_bias, randn(n, seed=7) * has_bias
    bias = gate_up_rows(gate_bias[:, None], up_bias[:, None]).flatten() if has_bias else None
    y = _multiply(team, x, pack_linear(gate_up_rows(gate, up)), 2 * n, Into.SWIGLU, torch.empty(rows, n), bias)
    gates, ups = (x.double() @ part.double().T + b for part, b in ((gate, gate_bias), (up, up_bias)))
    exact = torch.nn.functional.silu(gates) * ups
    # The slope of silu is below 1.1, and |silu(g)| at most |g|.
    bound = 1.1 * (_worst_error(x, gate) * ups.abs() + _worst_error(x, up) * gates.abs()) + 8 * _EPSILON * exact.abs()
    assert ((y - exact).abs() <= bound).all()


def test_gates_of_any_size(team: Team) -> None:
    """One input, so that gates are the weights."""
    gate = torch.linspace(-120.0, 120.0, 4801)[:, None]
    panels, y = pack_linear(gate_up_rows(gate, torch.ones_like(gate))), torch.empty(1, len(gate))
    _multiply(team, torch.ones(1, 1), panels, 2 * len(gate), Into.SWIGLU, y)
    exact = torch.nn.functional.silu(gate.double()).T
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("into", list(Into))
@pytest.mark.parametrize(("n", "k"), [(96, 40), (130, 577), (64, 1024)])
def test_a_row_does_not_see_its_company_or_the_lanes(n: int, k: int, into: Into) -> None:
    width = n // 2 if into is Into.SWIGLU else n
    most = 300
    x, panels, before = randn(most, k), pack_linear(randn(n, k, seed=4)), randn(most, width, seed=5)
    bias = randn(panels.shape[0] * 32, seed=6)
    one_by_one = before.clone()
    alone = Team(1)
    for i in range(most):
        _multiply(alone, x[i : i + 1], panels, n, into, one_by_one[i : i + 1], bias)
    for team in (alone, Team(2), Team(3)):
        for rows in (*range(1, 44), 71, most):
            for first in (0, most - rows):
                part = slice(first, first + rows)
                y = _multiply(team, x[part], panels, n, into, before[part].clone(), bias)
                assert torch.equal(y, one_by_one[part]), (team, rows, first)


def test_strides_do_not_show_and_nothing_else_is_written(team: Team) -> None:
    """Rows that lie a multiple of 4 KiB apart are grouped in another way."""
    x, panels = randn(61, 50), pack_linear(randn(70, 50, seed=4))
    expected = linear(team, x, matrix_of(PackedMatrix(panels), 70, 50), Into.STORE, torch.empty(61, 70))
    for stride in (50, 51, 128, 1024, 2048):
        wide, out = torch.full((61, stride), torch.nan), torch.full((61, 97), 7.0)
        wide[:, :50] = x
        _multiply(team, wide[:, :50], panels, 70, Into.STORE, out[:, :70])
        assert torch.equal(out[:, :70], expected)
        assert (out[:, 70:] == 7.0).all()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 4), (32, 4), (100, 6)])
def test_unpacking_inverts_packing_and_padding_is_zero(n: int, k: int) -> None:
    weight = randn(n, k)
    panels = pack_linear(weight)
    assert panels.shape == (-(-n // 32), k, 32) and panels.is_contiguous()
    assert torch.equal(unpack_linear(panels, n), weight)
    assert panels.sum(dtype=torch.float64) == pytest.approx(weight.sum(dtype=torch.float64).item())


def test_gate_and_up_lie_side_by_side() -> None:
    gate, up = torch.arange(40.0)[:, None], 100 + torch.arange(40.0)[:, None]
    panels = pack_linear(gate_up_rows(gate, up))
    assert panels.shape == (3, 1, 32)
    assert panels[1, 0].tolist() == [*range(16, 32), *range(116, 132)]
    assert panels[2, 0].tolist() == [*range(32, 40), *[0.0] * 8, *range(132, 140), *[0.0] * 8]


def test_gate_and_up_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="equal shapes"):
        pack_linear(gate_up_rows(torch.zeros(16, 4), torch.zeros(16, 5)))
