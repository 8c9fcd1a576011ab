"""Norms and gates in Triton against the plain ones in float64 on the same numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.triton import KERNELS
from tests.kernels.triton.tensors import DTYPES, assert_rounded, randn

# The second rounding of a half type is of a product that the first has moved by up to half a step.
_ULPS = {torch.float32: 3.0, torch.bfloat16: 1.6, torch.float16: 1.6}
_ROWS, _WIDTHS = (0, 1, 7), (1, 31, 64, 576, 4096, 16384)
_SOME = [(0, 64, "bf16"), (1, 1, "f32"), (7, 31, "bf16"), (7, 576, "f32"), (1, 4096, "f16"), (2, 16384, "bf16")]
_ALL = itertools.product(_ROWS, _WIDTHS, ("f32", "bf16", "f16"))
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _ALL if case not in _SOME)]


def _exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize(("rows", "width", "name"), _GRID)
def test_norm(rows: int, width: int, name: str, device: torch.device) -> None:
    dtype = DTYPES[name]
    x, weight = randn(rows, width, dtype=dtype) * 4, randn(width, dtype=dtype, seed=4)
    got = KERNELS.rms_norm(x.to(device), weight.to(device), 1e-5)
    assert got.dtype == dtype
    assert_rounded(got, _exact_norm(x, weight, 1e-5), _ULPS[dtype])


@pytest.mark.parametrize(("rows", "width", "name"), _GRID)
def test_norm_after_an_addition(rows: int, width: int, name: str, device: torch.device) -> None:
    dtype = DTYPES[name]
    x, residual = randn(rows, width, dtype=dtype) * 4, randn(rows, width, dtype=dtype, seed=5)
    weight = randn(width, dtype=dtype, seed=4)
    got, total = KERNELS.add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    assert torch.equal(total.cpu(), residual + x)
    assert_rounded(got, _exact_norm(residual + x, weight, 1e-5), _ULPS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_where_the_plain_kernels_round(dtype: torch.dtype, device: torch.device) -> None:
    """Nearly all numbers are then the same; another order of a sum, or another exponential, moves a few by a step."""
    x, residual = randn(20, 512, dtype=dtype) * 4, randn(20, 512, dtype=dtype, seed=5)
    weight = randn(512, dtype=dtype, seed=4)
    moved = [tensor.to(device) for tensor in (x, residual, weight)]
    normed, gated = KERNELS.add_rms_norm(*moved, 1e-5)[0].cpu(), KERNELS.silu_mul(moved[0]).cpu()
    assert float((normed == reference.add_rms_norm(x, residual, weight, 1e-5)[0]).double().mean()) > 0.999
    assert float((gated == reference.silu_mul(x)).double().mean()) > 0.999


def test_double_rows_are_normed_in_single_precision(device: torch.device) -> None:
    """As the checkpoints' own code does."""
    x, weight = randn(5, 80, dtype=torch.float64), randn(80, dtype=torch.float64, seed=4)
    got = KERNELS.rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5), rtol=1e-6, atol=0)
    assert not torch.equal(got, _exact_norm(x, weight, 1e-5))


def test_norm_keeps_shapes_and_reads_strides(device: torch.device) -> None:
    wide, weight = randn(6, 3, 100), randn(40, seed=4)
    for x in (wide[:, 0, :40], wide[:, :, :40], wide.transpose(0, 2)[:40].transpose(0, 2), wide[::2, 1, 20:60]):
        got = KERNELS.rms_norm(x.to(device), weight.to(device), 1e-5)
        assert got.shape == x.shape
        assert_rounded(got, _exact_norm(x, weight, 1e-5), 3.0)


def test_zeros_stay_zero_and_small_rows_are_ruled_by_eps(device: torch.device) -> None:
    x, weight = torch.zeros(2, 32), torch.ones(32)
    x[1] = 1e-20
    got = KERNELS.rms_norm(x.to(device), weight.to(device), 1e-6)
    assert not got[0].any()
    assert_rounded(got[1], torch.full((32,), 1e-17, dtype=torch.float64), 4.0)


def test_a_row_that_no_program_can_hold_is_refused(device: torch.device) -> None:
    x = torch.zeros(1, 16385, device=device)
    with pytest.raises(ValueError, match="16385 numbers"):
        KERNELS.rms_norm(x, x[0], 1e-5)


@pytest.mark.parametrize(("rows", "width", "name"), _GRID)
def test_gate(rows: int, width: int, name: str, device: torch.device) -> None:
    dtype = DTYPES[name]
    x = randn(rows, 2 * width, dtype=dtype) * 3
    got = KERNELS.silu_mul(x.to(device))
    gate, up = x.double().chunk(2, dim=-1)
    assert got.dtype == dtype
    assert_rounded(got, torch.nn.functional.silu(gate) * up, 6.0 if dtype == torch.float32 else 1.6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_of_any_size(device: torch.device) -> None:
    gate = torch.linspace(-100.0, 100.0, 4001)
    got = KERNELS.silu_mul(torch.cat((gate, torch.ones(4001)))[None].to(device))
    # The error of exp grows with its argument on a GPU.
    exact = torch.nn.functional.silu(gate.double())[None]
    torch.testing.assert_close(got.cpu().double(), exact, rtol=2e-5, atol=1e-36)


def test_double_gates(device: torch.device) -> None:
    x = randn(3, 50, dtype=torch.float64)
    got = KERNELS.silu_mul(x.to(device)).cpu()
    torch.testing.assert_close(got, reference.silu_mul(x), rtol=1e-13, atol=0)
