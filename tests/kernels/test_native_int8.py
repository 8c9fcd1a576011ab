"""The compiled int8 product equals its plain meaning bit by bit, whatever the company, lanes and instructions."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.native.library import Into, matrix_of, vector_width
from tandem_kernels.native.pack import gate_up_rows
from tandem_kernels.native.pack_codes import PackedMatrix, pack_coded
from tandem_kernels.reference.coded import linear_codes, round_to_int8
from tandem_kernels.reference.linear_int8 import linear_int8, quantize_weight
from tests.kernels.builds import INT8_PRODUCT, Builds, Product
from tests.kernels.codes import INTEGER_FORMATS, randn

_WITHOUT = {
    "machine": (),
    "bytes-512": ("-mno-avx512vnni", "-mno-avxvnni"),
    "bytes-256": ("-mno-avx512f", "-mno-avxvnni"),
    "plain": ("-mno-avx512f", "-mno-avx2"),
}
"""Builds by what they must do without; the same bits are expected of each."""

_SHAPES = [(1, 32, None), (33, 64, 32), (95, 192, 96), (576, 576, 192), (77, 1536, 32), (40, 4096, None)]
_ROWS = [1, 2, 3, 4, 5, 8, 9, 13, 31, 141]


def _packed(weight: torch.Tensor, group: int | None = None) -> PackedMatrix:
    return pack_coded(round_to_int8(weight, group))


def _rows(m: int, k: int) -> torch.Tensor:
    """Rows of uneven size, with groups of zeros, of subnormal numbers and of numbers that are not finite."""
    x = randn(m, k) * randn(m, k, seed=9).exp()
    x[0, :32] = 0
    x[m // 2, :32] *= 1e-42
    if m > 4:
        x[3, 7], x[4, 8] = float("inf"), float("nan")
    return x


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(INT8_PRODUCT, _WITHOUT, tmp_path_factory.mktemp("builds"))


# Each is compiled first, which takes seconds.
_EACH = [pytest.param(name, marks=pytest.mark.nightly if _WITHOUT[name] else ()) for name in _WITHOUT]


@pytest.fixture(params=_EACH)
def product(request: pytest.FixtureRequest, builds: Builds) -> Product:
    return builds[request.param]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit but for what a NaN carries."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.nightly
def test_builds_differ_in_what_they_use(builds: Builds) -> None:
    """So that the tests below compare different code."""
    assert [builds[name].library.has_byte_product() for name in ("bytes-512", "bytes-256", "plain")] == [1, 1, 0]
    assert builds["bytes-256"].library.width() == 8
    assert builds["bytes-512"].library.width() == builds["machine"].library.width() == vector_width()


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("n", "k", "group"), _SHAPES)
def test_store_and_add_are_the_plain_product(product: Product, n: int, k: int, group: int | None, rows: int) -> None:
    x, weight, bias, before = _rows(rows, k), randn(n, k, seed=4), randn(n, seed=5), randn(rows, n, seed=6)
    weight[0] = 0
    packed, quantised = _packed(weight, group), quantize_weight(weight, group)
    empty, plain = torch.full((rows, n), 5.0), matrix_of(packed, n, k)
    assert _equal(product.multiply_int8(x, plain, empty.clone()), linear_int8(x, *quantised))
    biased, expected = matrix_of(packed, n, k, bias), linear_int8(x, *quantised, bias)
    assert _equal(product.multiply_int8(x, biased, empty.clone()), expected)
    added = product.multiply_int8(x, biased, before.clone(), Into.ADD)
    assert _equal(added, before + expected)


@pytest.mark.parametrize(("n", "k", "rows"), [(1, 32, 1), (33, 64, 3), (95, 192, 9), (70, 576, 31), (40, 256, 141)])
@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_formats_of_files(product: Product, name: str, n: int, k: int, rows: int) -> None:
    codes = INTEGER_FORMATS[name].random(n, k)
    k = codes.shape[1]
    x, bias, before, packed = _rows(rows, k), randn(n, seed=5), randn(rows, n, seed=6), pack_coded(codes)
    stored = product.multiply_int8(x, matrix_of(packed, n, k), torch.full((rows, n), 5.0))
    assert _equal(stored, linear_codes(x, codes))
    added = product.multiply_int8(x, matrix_of(packed, n, k, bias), before.clone(), Into.ADD)
    assert _equal(added, before + linear_codes(x, codes, bias))


@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_the_largest_codes_and_activations(product: Product, name: str) -> None:
    """Codes and activations are at their limits, where sums of 16 bits are largest."""
    codes = INTEGER_FORMATS[name].random(40, 64)
    largest = (1 << codes.numbers.bits) - 1
    codes.codes[:8], codes.codes[8:16] = 0, largest
    codes.codes[16:24, ::2], codes.codes[16:24, 1::2] = largest, 0
    x = torch.ones(4, codes.shape[1])
    x[1] = -1
    x[2, ::2] = x[3, 1::2] = -1
    stored = product.multiply_int8(x, matrix_of(pack_coded(codes), *codes.shape), torch.full((4, 40), 5.0))
    assert _equal(stored, linear_codes(x, codes))


@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, None), (16, 64, 32), (24, 64, None), (160, 576, 192)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up(
    product: Product, builds: Builds, n: int, k: int, group: int | None, rows: int, has_bias: bool
) -> None:
    x, gate, up = randn(rows, k), randn(n, k, seed=4), randn(n, k, seed=5)
    gate_bias, up_bias = randn(n, seed=6) * has_bias, randn(n, seed=7) * has_bias
    bias = gate_up_rows(gate_bias[:, None], up_bias[:, None]).flatten() if has_bias else None
    matrix = matrix_of(_packed(gate_up_rows(gate, up), group), 2 * n, k, bias)
    y = product.multiply_int8(x, matrix, torch.empty(rows, n), Into.SWIGLU)
    gates = linear_int8(x, *quantize_weight(gate, group), gate_bias)
    ups = linear_int8(x, *quantize_weight(up, group), up_bias)
    exact = torch.nn.functional.silu(gates.double()) * ups.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-30)
    assert torch.equal(y, builds["machine"].multiply_int8(x, matrix, torch.empty(rows, n), Into.SWIGLU))


@pytest.mark.parametrize("name", ["int8 of 96", "q4_1", "q5_k", "q6_k"])
@pytest.mark.parametrize("into", list(Into))
def test_a_row_does_not_see_its_company_or_the_lanes(builds: Builds, into: Into, name: str) -> None:
    codes = INTEGER_FORMATS[name].random(160, 192)
    product, n, k, most = builds["machine"], 130, codes.shape[1], 150
    width = n // 2 if into is Into.SWIGLU else n
    x, before = _rows(most, k), randn(most, width, seed=5)
    matrix, one_by_one = matrix_of(pack_coded(codes), n, k), before.clone()
    for i in range(most):
        product.multiply_int8(x[i : i + 1], matrix, one_by_one[i : i + 1], into, lanes=1)
    for lanes in (1, 2, 3):
        for rows in (*range(1, 20), 71, most):
            for first in (0, most - rows):
                part = slice(first, first + rows)
                y = product.multiply_int8(x[part], matrix, before[part].clone(), into, lanes=lanes)
                assert _equal(y, one_by_one[part]), (lanes, rows, first)


def test_strides_do_not_show_and_nothing_else_is_written(product: Product) -> None:
    x, matrix = randn(21, 64), matrix_of(_packed(randn(70, 64, seed=4)), 70, 64)
    expected = product.multiply_int8(x, matrix, torch.empty(21, 70))
    wide, out = torch.full((21, 80), torch.nan), torch.full((21, 97), 7.0)
    wide[:, :64] = x
    product.multiply_int8(wide[:, :64], matrix, out[:, :70])
    assert torch.equal(out[:, :70], expected)
    assert (out[:, 70:] == 7.0).all()


def test_no_rows(product: Product) -> None:
    y = product.multiply_int8(torch.empty(0, 32), matrix_of(_packed(randn(32, 32)), 32, 32), torch.empty(0, 32))
    assert y.shape == (0, 32)


def test_the_largest_sums_are_exact(product: Product) -> None:
    """All products of a group at their limit and of one sign, where sums of 16 bits would saturate."""
    packed = _packed(torch.full((33, 64), 127.0))
    for sign in (1.0, -1.0):
        x = torch.full((2, 64), sign * 127.0)
        y = product.multiply_int8(x, matrix_of(packed, 33, 64), torch.empty(2, 33))
        assert (y == sign * 64 * 127 * 127).all()


@pytest.mark.parametrize("group", [None, 32])
def test_embeddings(product: Product, group: int | None) -> None:
    coded = round_to_int8(randn(45, 96), group)
    matrix = matrix_of(pack_coded(coded), 45, 96)
    for token in (0, 31, 32, 44):
        assert torch.equal(product.embed(matrix, token), coded.floats()[token])


def test_features_without_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        round_to_int8(torch.ones(4, 48))
