"""Products with weights in few bits in Triton against those with the restored weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem_kernels.contract import ExpertRouting
from tandem_kernels.device_codes import to_device_codes
from tandem_kernels.dispatch import REFERENCE
from tandem_kernels.reference.coded import CodedMatrix, NumberFormat, ScaleFormat, Scales, round_to_float8
from tandem_kernels.reference.experts import mix_experts
from tandem_kernels.triton import BATCH_INVARIANT, KERNELS
from tests.covering import covering
from tests.kernels.codes import FORMATS
from tests.kernels.triton.tensors import DTYPES, randn, rounded_rows

_EVERY = [
    case
    for case in itertools.product(FORMATS, (1, 70), (160, 512), ("f32", "bf16", "f16"), (False, True))
    if (case[0], case[3]) != ("nvfp4", "f16")  # these random ones are too large
]
_SOME = covering(_EVERY)
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _EVERY if case not in _SOME)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_device_has_the_bits_of_the_file(name: str, device: torch.device) -> None:
    """Numbers of two to four bits take four, others eight."""
    matrix = FORMATS[name].random(10, 512)
    held = to_device_codes(matrix, device)
    assert torch.equal(held.floats(), matrix.floats())
    bits = 4 if matrix.numbers.bits <= 4 else 8
    assert held.data.nbytes == 10 * matrix.shape[1] * bits // 8
    assert held.num_bytes == held.data.nbytes + sum(part.nbytes for part in matrix.scales.parts)


@pytest.mark.parametrize(("name", "rows", "inputs", "kind", "is_batch_invariant"), _GRID, ids=str)
def test_products_are_those_of_the_restored_weights(
    name: str, rows: int, inputs: int, kind: str, is_batch_invariant: bool, device: torch.device
) -> None:
    """Operands are the same bits, so that only the order of sums differs."""
    dtype, matrix = DTYPES[kind], FORMATS[name].random(70, inputs)
    kernels = BATCH_INVARIANT if is_batch_invariant else KERNELS
    # Small rows: sums of powers of two up to 2**12 stay within half precision.
    x, bias = randn(rows, matrix.shape[1], dtype=dtype) / 1024, randn(70, dtype=dtype, seed=5)
    got = kernels.linear(x.to(device), kernels.to_weight(matrix, device, dtype), bias.to(device))
    restored = matrix.floats().to(dtype)
    expected = BATCH_INVARIANT.linear(x.to(device), restored.to(device), bias.to(device))
    assert got.dtype == dtype
    scale = x.double().abs() @ restored.double().abs().T + bias.double().abs()
    ulps = 1e-5 if kind == "f32" else torch.finfo(dtype).eps
    assert bool(((got - expected).cpu().double().abs() <= ulps * scale).all())


@pytest.mark.parametrize("name", ["q4_k", "nvfp4", "fp8 of 64"])
def test_a_row_has_the_same_bits_in_any_company(name: str, device: torch.device) -> None:
    matrix = FORMATS[name].random(70, 256)
    x, weight = randn(150, matrix.shape[1], dtype=torch.bfloat16).to(device), to_device_codes(matrix, device)
    together = BATCH_INVARIANT.linear(x, weight, None)
    for start, stop in ((0, 1), (17, 18), (5, 69), (1, 150)):
        assert torch.equal(BATCH_INVARIANT.linear(x[start:stop], weight, None), together[start:stop])


_MIXTURES = list(itertools.product(FORMATS, (2, 30), ("f32", "bf16"), (False, True)))
_SOME_MIXTURES = [
    (name, (2, 30)[i % 2], ("f32", "bf16")[i // 2 % 2], bool((i // 4 + i) % 2)) for i, name in enumerate(FORMATS)
]
"""Each format once, with the other values in turn."""


@pytest.mark.parametrize(
    ("name", "rows", "kind", "is_batch_invariant"),
    [
        *_SOME_MIXTURES,
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in _MIXTURES if case not in _SOME_MIXTURES),
    ],
)
def test_mixtures_are_those_of_the_restored_experts(
    name: str, rows: int, kind: str, is_batch_invariant: bool, device: torch.device
) -> None:
    """Of matrices in two formats, as files have them."""
    dtype, kernels = DTYPES[kind], BATCH_INVARIANT if is_batch_invariant else KERNELS
    experts, inner = 3, 96
    gate_up = FORMATS[name].random(experts * 2 * inner, 256)
    inputs = gate_up.shape[1]
    down = FORMATS["q4_1"].random(experts * inputs, inner)
    # Gates are about 1.
    x = (randn(rows, inputs) / (16 * gate_up.floats().std())).to(dtype)
    chosen, weights = REFERENCE.route(randn(rows, experts, seed=6).float(), None, ExpertRouting(2))
    split = [to_device_codes(matrix, device).split_rows(experts) for matrix in (gate_up, down)]
    got = kernels.mix_experts(x.to(device), chosen.to(device), weights.to(dtype).to(device), *split)
    restored = [matrix.floats().to(dtype).view(experts, -1, matrix.shape[1]).to(device) for matrix in (gate_up, down)]
    expected = kernels.mix_experts(x.to(device), chosen.to(device), weights.to(dtype).to(device), *restored)
    largest = float(expected.abs().max())
    assert largest > 0 and float((got - expected).abs().max()) <= (1e-5 if kind == "f32" else 2e-2) * largest
    mean = float((got - expected).abs().mean() / expected.abs().mean())
    assert mean <= (1e-5 if kind == "f32" else 3e-3)


def test_what_it_does_not_multiply_is_refused(device: torch.device) -> None:
    weight = to_device_codes(FORMATS["q4_0"].random(3, 64), device)
    x = torch.zeros(2, 64, device=device)
    for linear in (KERNELS.linear, BATCH_INVARIANT.linear):
        with pytest.raises(ValueError, match=r"rows \(2, 32\) times a weight \(3, 64\)"):
            linear(x[:, :32].contiguous(), weight, None)
        with pytest.raises(ValueError, match="float64"):
            linear(x.double(), weight, None)
        with pytest.raises(ValueError, match="a bias"):
            linear(x, weight, x[0, :2])


_ROUNDED = {
    "of blocks": (256, Scales(ScaleFormat.FLOAT, (randn(70, 2).abs() / 64,), 128)),
    "of rows": (192, Scales(ScaleFormat.FLOAT, (randn(70, 1).abs() / 64,), 192)),
    "of rows in halves": (96, Scales(ScaleFormat.HALF, (randn(70, 1).abs().half() / 64,), 96)),
}


def _float8(name: str) -> CodedMatrix:
    width, scales = _ROUNDED[name]
    return CodedMatrix(NumberFormat.E4M3, FORMATS["fp8 of 64"].random(70, 384).codes[:, :width].contiguous(), scales)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", _ROUNDED)
def test_rows_are_rounded_to_float8(name: str, kind: str, rows: int, device: torch.device) -> None:
    dtype, matrix = DTYPES[kind], _float8(name)
    x, bias = randn(rows, matrix.shape[1], dtype=dtype), randn(70, dtype=dtype, seed=5)
    x[0, :50] = 0
    x[-1, -50:] *= 1e4
    weight = to_device_codes(matrix, device).with_rounded_rows()
    assert weight.rounds_rows
    got = KERNELS.linear(x.to(device), weight, bias.to(device))
    exact = rounded_rows(x).double() @ matrix.floats().double().T + bias.double()
    scale = rounded_rows(x).double().abs() @ matrix.floats().double().abs().T + bias.double().abs()
    assert bool(((got.cpu().double() - exact).abs() <= (1e-4 if kind == "f32" else 2.0**-8) * scale).all())
    plain = x.double() @ matrix.floats().double().T + bias.double()
    assert bool(((plain - exact).abs() > 1e-4 * scale).any()), "nothing was rounded"
    alone = BATCH_INVARIANT.linear(x[-1:].to(device), weight, None)
    assert torch.equal(alone, BATCH_INVARIANT.linear(x.to(device), weight, None)[-1:])


def test_mixtures_round_rows_too(device: torch.device) -> None:
    experts, inner = 3, 160
    matrices = [round_to_float8(randn(experts * n, k, seed=n) / 16) for n, k in ((2 * inner, 256), (256, inner))]
    held = [to_device_codes(matrix, device).with_rounded_rows().split_rows(experts) for matrix in matrices]
    x = randn(9, 256)
    chosen, weights = REFERENCE.route(randn(9, experts, seed=6), None, ExpertRouting(2))
    got = KERNELS.mix_experts(x.to(device), chosen.to(device), weights.to(device), *held)
    floats = [matrix.floats().view(experts, -1, matrix.shape[1]) for matrix in matrices]

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return rounded_rows(rows) @ weight.T

    expected = mix_experts(x, chosen, weights, *floats, linear=linear, silu_mul=REFERENCE.silu_mul)
    # A number between the two may fall to the other side of a tie.
    assert float((got.cpu() - expected).abs().max() / expected.abs().max()) < 1e-2
    assert float((got.cpu() - expected).abs().mean() / expected.abs().mean()) < 1e-4


def test_only_float8_in_whole_groups_rounds_rows(device: torch.device) -> None:
    for name in ("fp8 of 64", "nvfp4", "q8_0"):
        assert not to_device_codes(FORMATS[name].random(2, 256), device).with_rounded_rows().rounds_rows


def test_float64_is_multiplied_in_floats(device: torch.device) -> None:
    """Kernels for codes have no products in float64."""
    matrix = FORMATS["q4_0"].random(3, 64)
    held = KERNELS.to_weight(matrix, device, torch.float64)
    assert isinstance(held, torch.Tensor) and torch.equal(held.cpu(), matrix.floats().double())
