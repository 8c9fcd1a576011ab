"""Mixtures of experts in Triton against the plain ones; a row's bits are its own, and nothing waits for the host."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from tandem_kernels.contract import ExpertRouting
from tandem_kernels.dispatch import REFERENCE
from tandem_kernels.triton import BATCH_INVARIANT, KERNELS
from tests.kernels.triton.tensors import DTYPES, ROUNDOFF, randn

_MODULE = importlib.import_module("tandem_kernels.triton.experts")
Mixture = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_SOME = [(1, 4, 2, "f32"), (7, 6, 3, "bf16"), (70, 3, 2, "f16"), (33, 20, 1, "bf16")]
_ALL = itertools.product((1, 7, 70), (3, 20), (1, 3), ("f32", "bf16", "f16"))
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _ALL if case not in _SOME)]


def _mixture(rows: int, num_experts: int, num_chosen: int, dtype: torch.dtype, width: int = 70) -> Mixture:
    logits = randn(rows, num_experts, seed=6).float()
    experts, weights = REFERENCE.route(logits, None, ExpertRouting(num_chosen))
    gate_up = randn(num_experts, 2 * 40, width, dtype=dtype, seed=4) / 8
    down = randn(num_experts, width, 40, dtype=dtype, seed=5) / 8
    return randn(rows, width, dtype=dtype), experts, weights.to(dtype), gate_up, down


def _check(got: torch.Tensor, mixture: Mixture) -> None:
    x, experts, weights, gate_up, down = mixture
    wide = REFERENCE.mix_experts(x.double(), experts, weights.double(), gate_up.double(), down.double())
    assert got.dtype == x.dtype and got.shape == x.shape
    # Products, the gate and each addition are rounded to the type.
    scale = REFERENCE.mix_experts(
        x.double().abs(), experts, weights.double().abs(), gate_up.double().abs(), down.double().abs()
    )
    assert bool(((got.cpu().double() - wide).abs() <= 8 * ROUNDOFF[x.dtype] * (scale + 1e-3)).all())


@pytest.mark.parametrize(("rows", "num_experts", "num_chosen", "name"), _GRID)
def test_sums(rows: int, num_experts: int, num_chosen: int, name: str, device: torch.device) -> None:
    mixture = _mixture(rows, num_experts, num_chosen, DTYPES[name])
    _check(KERNELS.mix_experts(*(part.to(device) for part in mixture)), mixture)
    _check(BATCH_INVARIANT.mix_experts(*(part.to(device) for part in mixture)), mixture)


@pytest.mark.parametrize("is_many", [False, True])
def test_both_kinds_of_tiles_round_as_the_plain_kernels(
    is_many: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_MODULE, "_MANY_PLACES", 0 if is_many else 1 << 30)
    mixture = _mixture(90, 4, 2, torch.float32, width=150)
    got = KERNELS.mix_experts(*(part.to(device) for part in mixture))
    torch.testing.assert_close(got.cpu(), REFERENCE.mix_experts(*mixture), rtol=1e-5, atol=1e-6)


def test_experts_of_other_ranks_add_nothing(device: torch.device) -> None:
    """Rows of which some, or all, experts are elsewhere."""
    x, experts, weights, gate_up, down = _mixture(20, 6, 3, torch.float32)
    experts = torch.where(experts < 4, experts, -1)
    assert (experts < 0).any() and (experts[:3] >= 0).any()
    experts[5] = -1
    mixture = (x, experts, weights, gate_up[:4].contiguous(), down[:4].contiguous())
    got = KERNELS.mix_experts(*(part.to(device) for part in mixture)).cpu()
    torch.testing.assert_close(got, REFERENCE.mix_experts(*mixture), rtol=1e-5, atol=1e-6)
    assert not got[5].any()


def test_all_rows_may_choose_one_expert(device: torch.device) -> None:
    x, experts, weights, gate_up, down = _mixture(100, 9, 1, torch.float32)
    mixture = (x, torch.full_like(experts, 7), weights, gate_up, down)
    got = KERNELS.mix_experts(*(part.to(device) for part in mixture)).cpu()
    torch.testing.assert_close(got, REFERENCE.mix_experts(*mixture), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_a_row_has_the_same_bits_in_any_company(name: str, device: torch.device) -> None:
    mixture = _mixture(120, 5, 2, DTYPES[name])
    x, experts, weights, gate_up, down = (part.to(device) for part in mixture)
    together = BATCH_INVARIANT.mix_experts(x, experts, weights, gate_up, down)
    for start, stop in ((0, 1), (17, 18), (5, 40), (30, 120)):
        part = slice(start, stop)
        alone = BATCH_INVARIANT.mix_experts(x[part], experts[part], weights[part], gate_up, down)
        assert torch.equal(alone, together[part])
    order = torch.randperm(120, device=device)
    mixed = BATCH_INVARIANT.mix_experts(x[order], experts[order], weights[order], gate_up, down)
    assert torch.equal(mixed, together[order])


def test_no_rows(device: torch.device) -> None:
    x, experts, weights, gate_up, down = (part.to(device) for part in _mixture(2, 4, 2, torch.float32))
    assert KERNELS.mix_experts(x[:0], experts[:0], weights[:0], gate_up, down).shape == (0, 70)


def test_what_it_does_not_multiply_is_refused(device: torch.device) -> None:
    x, experts, weights, gate_up, down = (part.to(device) for part in _mixture(2, 4, 2, torch.float32))
    with pytest.raises(ValueError, match=r"float32 times .*bfloat16"):
        KERNELS.mix_experts(x, experts, weights, gate_up.bfloat16(), down)
    with pytest.raises(ValueError, match="strides"):
        KERNELS.mix_experts(x, experts, weights, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down)
