"""Products compiled for narrower vectors than the machine's have the bits of the library and of the plain kernels."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.native.library import Into, Team, WeightFormat, linear, matrix_of, vector_width
from tandem_kernels.native.pack import pack_linear
from tandem_kernels.native.pack_int4 import pack_exact, pack_fours
from tandem_kernels.native.pack_int8 import pack_linear_int8
from tandem_kernels.reference.int4 import linear_codes
from tandem_kernels.reference.linear_int8 import linear_int8, quantize_weight
from tests.kernels.builds import FLOAT_PRODUCT, INT8_PRODUCT, Builds, Product
from tests.kernels.codes import WEIGHTS, random_codes

_WITHOUT = {
    "avx2": ("-mno-avx512f", "-mno-avxvnni"),
    "plain": ("-mno-avx512f", "-mno-avxvnni", "-mno-avx2", "-mno-f16c"),
}
"""Builds by what they must do without; on a machine without one of these two builds are the same."""

_ROWS = [1, 3, 4, 7, 33]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(FLOAT_PRODUCT + INT8_PRODUCT, _WITHOUT, tmp_path_factory.mktemp("builds"))


# Compiled first: the first takes 4 seconds, the second 20.
@pytest.fixture(params=["avx2", pytest.param("plain", marks=pytest.mark.nightly)])
def product(request: pytest.FixtureRequest, builds: Builds) -> Product:
    return builds[request.param]


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_builds_are_narrower(product: Product) -> None:
    assert product.library.width() == min(vector_width(), 8)


@pytest.mark.parametrize("into", list(Into))
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(
    ("coding", "k"), [(WeightFormat.FLOAT, 203), *((c, 192) for c in WeightFormat if c is not WeightFormat.FLOAT)]
)
def test_products_have_the_bits_of_the_library(
    product: Product, coding: WeightFormat, k: int, rows: int, into: Into
) -> None:
    n = 96
    x, weight, bias = _random(rows, k, seed=5) * 4, WEIGHTS[coding](n, k), _random(n, seed=6)
    panels, scales = pack_exact(weight)
    matrix = matrix_of(panels, n, k, scales, bias)
    assert matrix.coding == coding
    before = _random(rows, n // 2 if into is Into.SWIGLU else n, seed=7)
    y = product.multiply(x, matrix, before.clone(), into)
    assert not torch.equal(y, before)
    assert torch.equal(y, linear(Team(1), x, matrix_of(pack_linear(weight), n, k, bias=bias), into, before.clone()))


@pytest.mark.parametrize("coding", WEIGHTS)
def test_embeddings_are_unpacked_unchanged(product: Product, coding: WeightFormat) -> None:
    weight = WEIGHTS[coding](96, 192)
    panels, scales = pack_exact(weight)
    assert torch.equal(product.embed(matrix_of(panels, 96, 192, scales), 37), weight[37])


@pytest.mark.parametrize("into", [Into.STORE, Into.ADD])
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("is_coded", [False, True])
def test_int8_products_have_the_bits_of_the_plain_ones(product: Product, is_coded: bool, rows: int, into: Into) -> None:
    n, k, group = 96, 192, 64
    x, codes, bias, before = _random(rows, k), random_codes(n, k), _random(n, seed=5), _random(rows, n, seed=6)
    weight = codes.floats()
    panels, scales = (pack_fours(weight), None) if is_coded else pack_linear_int8(weight, group)
    assert panels is not None
    expected = linear_codes(x, codes, bias) if is_coded else linear_int8(x, *quantize_weight(weight, group), bias)
    y = product.multiply_int8(x, matrix_of(panels, n, k, scales, bias), before.clone(), into)
    assert torch.equal(y, before + expected if into is Into.ADD else expected)
