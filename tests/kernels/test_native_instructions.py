"""Products compiled for narrower vectors than the machine's have the bits of the library and of the plain kernels."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.native.library import Into, Team, linear, matrix_of, vector_width
from tandem_kernels.native.pack import pack_linear
from tandem_kernels.native.pack_codes import PackedMatrix, pack_coded, pack_exact
from tandem_kernels.reference.coded import linear_codes
from tests.kernels.builds import FLOAT_PRODUCT, INT8_PRODUCT, Builds, Product
from tests.kernels.codes import FORMATS, INTEGER_FORMATS, randn

_WITHOUT = {
    "avx2": ("-mno-avx512f", "-mno-avxvnni"),
    "plain": ("-mno-avx512f", "-mno-avxvnni", "-mno-avx2", "-mno-f16c"),
}
"""Builds by what they must do without; on a machine without one of these two builds are the same."""

_ROWS = [1, 4, 33]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(FLOAT_PRODUCT + INT8_PRODUCT, _WITHOUT, tmp_path_factory.mktemp("builds"))


# Compiled first: the first takes 4 seconds, the second 20.
@pytest.fixture(params=["avx2", pytest.param("plain", marks=pytest.mark.nightly)])
def product(request: pytest.FixtureRequest, builds: Builds) -> Product:
    return builds[request.param]


def test_builds_are_narrower(product: Product) -> None:
    assert product.library.width() == min(vector_width(), 8)


def _weights(name: str) -> tuple[PackedMatrix, torch.Tensor]:
    """Return a random matrix of 96 features, packed and as floats."""
    if name in FORMATS:
        coded = FORMATS[name].random(96, 192)
        return pack_coded(coded), coded.floats()
    weight = randn(96, 203) if name == "float32" else randn(96, 192).bfloat16().float()
    return pack_exact(weight), weight


_NAMES = [*FORMATS, "bfloat16", "float32"]


@pytest.mark.parametrize("into", list(Into))
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("name", _NAMES)
def test_products_have_the_bits_of_the_library(product: Product, name: str, rows: int, into: Into) -> None:
    packed, weight = _weights(name)
    n, k = weight.shape
    x, bias = randn(rows, k, seed=5) * 4, randn(n, seed=6)
    before = randn(rows, n // 2 if into is Into.SWIGLU else n, seed=7)
    y = product.multiply(x, matrix_of(packed, n, k, bias), before.clone(), into)
    assert not torch.equal(y, before)
    floats = matrix_of(PackedMatrix(pack_linear(weight)), n, k, bias)
    assert torch.equal(y, linear(Team(1), x, floats, into, before.clone()))


@pytest.mark.parametrize("name", _NAMES)
def test_embeddings_are_unpacked_unchanged(product: Product, name: str) -> None:
    packed, weight = _weights(name)
    assert torch.equal(product.embed(matrix_of(packed, *weight.shape), 37), weight[37])


@pytest.mark.parametrize("into", [Into.STORE, Into.ADD])
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_int8_products_have_the_bits_of_the_plain_ones(product: Product, name: str, rows: int, into: Into) -> None:
    codes = INTEGER_FORMATS[name].random(96, 192)
    n, k = codes.shape
    x, bias, before = randn(rows, k), randn(n, seed=5), randn(rows, n, seed=6)
    expected = linear_codes(x, codes, bias)
    y = product.multiply_int8(x, matrix_of(pack_coded(codes), n, k, bias), before.clone(), into)
    assert torch.equal(y, before + expected if into is Into.ADD else expected)
