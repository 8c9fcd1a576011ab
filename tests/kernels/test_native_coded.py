"""Weights in few bits are the floats that they stand for: the compiled product of both has the same bits."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.native.library import Into, Team, embed, linear, matrix_of
from tandem_kernels.native.pack import gate_up_rows, pack_linear
from tandem_kernels.native.pack_codes import PackedMatrix, pack_coded, pack_exact
from tandem_kernels.reference.coded import (
    SCALES_OF,
    CodedMatrix,
    NumberFormat,
    ScaleFormat,
    Scales,
    join,
    linear_codes,
    round_to_int8,
)
from tandem_kernels.reference.linear_int8 import GROUP, quantize_rows
from tests.kernels.codes import FORMATS, randn

_CASES = [
    (1, 32, 1), (33, 64, 4), (96, 160, 2), (130, 576, 1), (40, 1600, 5), (33, 64, 13), (96, 160, 15), (130, 576, 29),
    (1, 32, 141), (40, 1600, 300),
]  # fmt: skip
"""Features, components and rows. 1,600 components are more than become floats at once."""
_STORED_BITS = {
    "q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q8_0": 8.5, "q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5,
    "q5_k": 5.5, "q6_k": 6.5625, "mxfp4": 4.25, "nvfp4": 4.5,
}  # fmt: skip
"""Bits per weight of these formats in a file."""


def _weights(name: str, n: int, k: int) -> tuple[PackedMatrix, torch.Tensor]:
    """Return a random matrix of a format, or of bfloat16 numbers, packed and as floats."""
    if name == "bfloat16":
        weight = randn(n, k).bfloat16().float()
        return pack_exact(weight), weight
    coded = FORMATS[name].random(n, k)
    return pack_exact(coded), coded.floats()


_NAMES = [*FORMATS, "bfloat16"]


@pytest.mark.parametrize("name", _STORED_BITS)
def test_memory_is_what_the_file_has(name: str) -> None:
    """Within five percent, of a matrix of whole panels."""
    n, k = 64, 1024
    packed, _ = _weights(name, n, k)
    num_bytes = packed.panels.nbytes + sum(part.nbytes for part in packed.scales)
    assert _STORED_BITS[name] <= num_bytes * 8 / (n * k) <= _STORED_BITS[name] * 1.05


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(("n", "k", "rows"), _CASES)
def test_products_have_the_bits_of_floats(team: Team, n: int, k: int, rows: int, name: str) -> None:
    packed, weight = _weights(name, n, k)
    k = weight.shape[1]
    x, bias, floats = randn(rows, k, seed=5), randn(n, seed=6), PackedMatrix(pack_linear(weight))
    for into in (Into.STORE, Into.ADD):
        y = linear(team, x, matrix_of(packed, n, k, bias), into, torch.ones(rows, n))
        assert torch.equal(y, linear(team, x, matrix_of(floats, n, k, bias), into, torch.ones(rows, n)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_gated_products_have_the_bits_of_floats(team: Team, rows: int, name: str) -> None:
    """Of gate and up, whose rows are put into the order of panels while they are codes."""
    n = 40
    gate, up = FORMATS[name].random(n, 96), FORMATS[name].random(n, 96, seed=8)
    both, k = join((gate, up)), gate.shape[1]
    assert both is not None
    order = gate_up_rows(torch.arange(n)[:, None] + 1, torch.arange(n)[:, None] + n + 1).flatten() - 1
    coded = matrix_of(pack_coded(both.rows(order.clamp(min=0))), 2 * n, k)
    floats = matrix_of(PackedMatrix(pack_linear(gate_up_rows(gate.floats(), up.floats()))), 2 * n, k)
    x = randn(rows, k, seed=5)
    y = linear(team, x, coded, Into.SWIGLU, torch.empty(rows, n))
    assert torch.equal(y, linear(team, x, floats, Into.SWIGLU, torch.empty(rows, n)))


@pytest.mark.parametrize("name", _NAMES)
def test_a_row_does_not_see_its_company_or_the_lanes(name: str) -> None:
    n, most = 130, 160
    packed, weight = _weights(name, n, 256)
    k = weight.shape[1]
    x, weights, alone = randn(most, k), matrix_of(packed, n, k), Team(1)
    one_by_one = torch.cat([linear(alone, row[None], weights, Into.STORE, torch.empty(1, n)) for row in x])
    for team in (alone, Team(2), Team(3)):
        for rows in (*range(1, 24), 71, most):
            for first in (0, most - rows):
                part = x[first : first + rows]
                y = linear(team, part, weights, Into.STORE, torch.empty(rows, n))
                assert torch.equal(y, one_by_one[first : first + rows]), (team, rows, first)


@pytest.mark.parametrize("name", _NAMES)
def test_embeddings_are_unpacked_unchanged(name: str) -> None:
    packed, weight = _weights(name, 70, 96)
    tokens = torch.tensor([0, 31, 32, 69, 31])
    assert torch.equal(embed(matrix_of(packed, *weight.shape), tokens), weight[tokens])


def test_floats_that_bfloat16_does_not_hold_stay_floats() -> None:
    weight = randn(40, 48)
    assert torch.equal(pack_exact(weight).panels, pack_linear(weight))


@pytest.mark.parametrize("name", FORMATS)
def test_selected_rows_are_those_of_the_floats(name: str) -> None:
    weight = FORMATS[name].random(9, 64)
    index = torch.tensor([7, 0, 0, 3])
    assert torch.equal(weight.rows(index).floats(), weight.floats()[index])


@pytest.mark.parametrize(
    "part", [range(256), range(768, 1536), range(32, 288), range(2048, 2304), range(2304)], ids=str
)
@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_those_of_the_floats(name: str, part: range) -> None:
    """A part that begins inside a group repeats scales, but for those of two levels."""
    matrix = FORMATS[name].random(6, 2304)
    found = matrix.columns(part)
    assert (found is None) == (FORMATS[name].multiple == 256 and part.start % 256 > 0)
    if found is not None:
        assert torch.equal(found.floats(), matrix.floats()[:, part.start : part.stop])
        assert found.scales.format is matrix.scales.format
        assert found.codes.untyped_storage().nbytes() == found.codes.nbytes, "it keeps the whole matrix"


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_are_no_whole_groups_of_codes_are_none(name: str) -> None:
    matrix = FORMATS[name].random(6, 256)
    width = matrix.shape[1]
    assert matrix.columns(range(width - 16)) is None
    assert matrix.columns(range(8, width)) is None
    # Half of 288 columns begins within a group of 96, at half of it.
    assert (matrix.columns(range(width // 2, width)) is None) == (FORMATS[name].multiple in (96, 256))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_are_no_whole_groups_are_refused(name: str) -> None:
    weight = FORMATS[name].random(4, 64)
    with pytest.raises(ValueError, match="no whole groups"):
        CodedMatrix(weight.numbers, weight.codes[:, :-8], weight.scales)


def test_scales_that_numbers_of_a_format_never_have_are_refused() -> None:
    tested = {(format.numbers, format.scales) for format in FORMATS.values()}
    assert tested == {(numbers, scales) for numbers, formats in SCALES_OF.items() for scales in formats}
    weight = FORMATS["q4_1"].random(4, 64)
    with pytest.raises(ValueError, match="INT6 codes with HALF_PAIRS scales"):
        CodedMatrix(NumberFormat.INT6, weight.codes, weight.scales)


def test_matrices_of_different_formats_are_not_joined() -> None:
    assert join((FORMATS["q4_k"].random(4, 256), FORMATS["q6_k"].random(4, 256))) is None


def test_numbers_that_are_not_finite_are_refused() -> None:
    codes, nan = torch.zeros((2, 32), dtype=torch.uint8), torch.tensor([[1.0], [float("nan")]])
    with pytest.raises(ValueError, match="scales that are not finite"):
        CodedMatrix(NumberFormat.INT4, codes, Scales(ScaleFormat.FLOAT, (nan,), 32))
    with pytest.raises(ValueError, match="scales that are not finite"):
        CodedMatrix(NumberFormat.E2M1, codes, Scales(ScaleFormat.POWER, (codes[:, :1] + 255,), 32))
    with pytest.raises(ValueError, match="scales that are not finite"):
        parts = (codes[:, :2] + 0x7F, torch.ones((2, 1)))
        CodedMatrix(NumberFormat.E2M1, codes, Scales(ScaleFormat.FLOAT8, parts, 16))
    with pytest.raises(ValueError, match="numbers that are not finite"):
        CodedMatrix(NumberFormat.E4M3, codes + 0xFF, Scales(ScaleFormat.FLOAT, (torch.ones((2, 1)),), 32))


def test_products_of_codes_with_int8_rows_err_only_by_the_rows() -> None:
    """By half a step of a row's group at most, and less on average than with int8 weights."""
    codes, x = FORMATS["q4_1"].random(64, 192), randn(40, 192)
    weight = codes.floats()
    exact = x.double() @ weight.double().T
    error = (linear_codes(x, codes) - exact).abs()
    half_steps = quantize_rows(x)[1].repeat_interleave(GROUP, dim=1) / 2
    assert (error <= half_steps.double() @ weight.abs().double().T * 1.001).all()
    assert error.mean() < (linear_codes(x, round_to_int8(weight, 96)) - exact).abs().mean()
