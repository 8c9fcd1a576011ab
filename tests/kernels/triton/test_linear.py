"""Batch-invariant products in Triton against float64 on the same numbers; a row's bits are its own."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from tandem_kernels.triton import BATCH_INVARIANT
from tests.kernels.triton.tensors import DTYPES, ROUNDOFF, randn

_MODULE = importlib.import_module("tandem_kernels.triton.linear")
_ROWS, _INPUTS, _OUTPUTS = (0, 1, 7, 130), (1, 31, 64, 576), (1, 31, 64, 200)
_SOME = [
    (0, 64, 64, "bf16"),
    (1, 1, 1, "f32"),
    (7, 31, 200, "bf16"),
    (130, 576, 64, "f16"),
    (1, 576, 31, "f32"),
    (130, 64, 200, "bf16"),
]
_ALL = itertools.product(_ROWS, _INPUTS, _OUTPUTS, ("f32", "bf16", "f16"))
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _ALL if case not in _SOME)]


def _check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The sum is rounded once to its type; before, float32 errs by a few roundoffs of what is added up."""
    wide, wide_weight = x.double(), weight.double()
    exact, magnitude = wide @ wide_weight.T, wide.abs() @ wide_weight.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    roundoff = ROUNDOFF[x.dtype]
    allowed = roundoff * exact.abs() + 40 * ROUNDOFF[torch.float32] * magnitude
    assert got.dtype == x.dtype and got.shape == exact.shape
    assert bool(((got.cpu().double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs", "name"), _GRID)
def test_products(rows: int, inputs: int, outputs: int, name: str, has_bias: bool, device: torch.device) -> None:
    dtype = DTYPES[name]
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=4)
    bias = randn(outputs, dtype=dtype, seed=5) if has_bias else None
    got = BATCH_INVARIANT.linear(x.to(device), weight.to(device), None if bias is None else bias.to(device))
    _check(got, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_tiles(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MODULE, "_WIDE", 100)
    x, weight = randn(150, 70, dtype=dtype), randn(300, 70, dtype=dtype, seed=4)
    _check(BATCH_INVARIANT.linear(x.to(device), weight.to(device), None), x, weight, None)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.nightly)]
)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = randn(300, 70, dtype=dtype).to(device), randn(70, 70, dtype=dtype, seed=4).to(device)
    together = BATCH_INVARIANT.linear(x, weight, None)
    for start, stop in ((0, 1), (17, 18), (5, 69), (100, 229), (1, 300)):
        assert torch.equal(BATCH_INVARIANT.linear(x[start:stop], weight, None), together[start:stop])
    order = torch.randperm(300, device=device)
    assert torch.equal(BATCH_INVARIANT.linear(x[order], weight, None), together[order])


def test_more_rows_of_tiles_than_start_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile is some program's, whatever the bands."""
    x, weight = randn(700, 40).to(device), randn(70, 40, seed=4).to(device)
    expected = BATCH_INVARIANT.linear(x, weight, None)
    for band in (1, 3, 100):
        monkeypatch.setattr(_MODULE, "_BAND", band)
        assert torch.equal(BATCH_INVARIANT.linear(x, weight, None), expected)
    _check(expected, x.cpu(), weight.cpu(), None)


def test_rows_that_lie_apart(device: torch.device) -> None:
    x, weight = randn(6, 100).to(device), randn(9, 40, seed=4).to(device)
    got = BATCH_INVARIANT.linear(x[::2, 20:60], weight, None)
    assert torch.equal(got, BATCH_INVARIANT.linear(x[::2, 20:60].clone(), weight, None))


def test_what_it_does_not_multiply_is_refused(device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match=r"float32 times .*bfloat16"):
        BATCH_INVARIANT.linear(x, x.bfloat16(), None)
    with pytest.raises(ValueError, match="float64"):
        BATCH_INVARIANT.linear(x.double(), x.double(), None)
    weight = torch.zeros(3, 8, device=device)
    for wrong in (torch.zeros(8, 3, device=device).T, torch.zeros(3, 9, device=device)):
        with pytest.raises(ValueError, match=r"rows \(2, 8\) times a weight"):
            BATCH_INVARIANT.linear(x, wrong, None)
    for bias in (weight[0, :2], weight[0, :6:2], weight[0, :3].half()):
        with pytest.raises(ValueError, match="a bias"):
            BATCH_INVARIANT.linear(x, weight, bias)
