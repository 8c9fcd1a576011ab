"""The compiled int8 product equals its plain meaning bit by bit, whatever the company, lanes and instructions."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from tandem_kernels.native.library import Into
from tandem_kernels.native.pack import gate_up_rows
from tandem_kernels.native.pack_coded import pack_fours
from tandem_kernels.native.pack_int8 import pack_linear_int8, unpack_int8
from tandem_kernels.reference.codes import linear_codes
from tandem_kernels.reference.linear_int8 import embed_int8, linear_int8, quantize_weight
from tests.kernels.builds import compile_each
from tests.kernels.codes import random_codes

pytestmark = pytest.mark.slow  # compiles the product several times

_ENTRY = """
#include "linear_int8.hpp"
#include <vector>
using namespace tandem;
extern "C" int activation_bytes() { return sizeof(Activation); }
extern "C" int width() { return kWidth; }
extern "C" void multiply(int lanes, const float* x, int ldx, int m, const std::uint8_t* panels, const float* scales,
                         const float* bias, int n, int k, int group, float* y, int ldy, int into) {
    std::vector<Activation> values(std::size_t(m) * k);
    std::vector<float> row_scales(std::size_t(m) * k / kRowGroup);
    std::vector<std::int32_t> sums(row_scales.size());
    const Int8Rows rows{values.data(), row_scales.data(), sums.data(), k};
    const Matrix matrix{scales ? Coding::kEight : Coding::kFour, panels, scales, bias, n, k, group};
    Team team(lanes);
    team.run([&](Lane& lane) {
        quantize_rows(lane, x, ldx, m, rows);
        lane.wait();
        linear(lane, rows, m, matrix, y, ldy, static_cast<Into>(into));
    });
}
extern "C" void embed(const std::uint8_t* panels, const float* scales, int n, int k, int group, std::int64_t token,
                      float* out) {
    embed_row({scales ? Coding::kEight : Coding::kFour, panels, scales, nullptr, n, k, group}, token, out);
}
"""
_WITHOUT = {
    "machine": (),
    "pairs-512": ("-mno-avx512vnni",),
    "pairs-256": ("-mno-avx512f", "-mno-avxvnni"),
    "plain": ("-mno-avx512f", "-mno-avx2"),
}
"""Builds by what they must do without; the same bits are expected of each."""

_SHAPES = [(1, 32, None), (33, 64, 32), (95, 192, 96), (576, 576, 192), (77, 1536, 32), (40, 4096, None)]
_ROWS = [1, 2, 3, 4, 5, 8, 9, 13, 31, 141]


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rows(m: int, k: int) -> torch.Tensor:
    """Rows of uneven size, with groups of zeros, of subnormal numbers and of numbers that are not finite."""
    x = _random(m, k) * _random(m, k, seed=9).exp()
    x[0, :32] = 0
    x[m // 2, :32] *= 1e-42
    if m > 4:
        x[3, 7], x[4, 8] = float("inf"), float("nan")
    return x


def _pointer(tensor: torch.Tensor | None) -> c_void_p | None:
    return None if tensor is None else c_void_p(tensor.data_ptr())


class Product:
    """One build of the product."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.width, self.activation_bytes = self._library.width(), self._library.activation_bytes()

    def multiply(
        self,
        x: torch.Tensor,
        packed: tuple[torch.Tensor, torch.Tensor | None],
        n: int,
        y: torch.Tensor,
        into: Into = Into.STORE,
        bias: torch.Tensor | None = None,
        lanes: int = 2,
    ) -> torch.Tensor:
        panels, scales = packed
        k = x.shape[1]
        group = 0 if scales is None else k // scales.shape[1]
        self._library.multiply(
            c_int(lanes), _pointer(x), c_int(x.stride(0)), c_int(len(x)), _pointer(panels), _pointer(scales),
            _pointer(bias), c_int(n), c_int(k), c_int(group), _pointer(y), c_int(y.stride(0)),
            c_int(int(into)),
        )  # fmt: skip
        return y

    def embed(self, packed: tuple[torch.Tensor, torch.Tensor], n: int, token: int) -> torch.Tensor:
        panels, scales = packed
        k = panels.shape[1] * 4
        out = torch.empty(k)
        self._library.embed(
            _pointer(panels), _pointer(scales), c_int(n), c_int(k), c_int(k // scales.shape[1]), c_int64(token),
            _pointer(out),
        )  # fmt: skip
        return out


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Product]:
    found = compile_each(_ENTRY, _WITHOUT, tmp_path_factory.mktemp("builds"))
    return {name: Product(path) for name, path in found.items()}


@pytest.fixture(params=_WITHOUT)
def product(request: pytest.FixtureRequest, products: dict[str, Product]) -> Product:
    if request.param not in products:
        pytest.skip("one kind of vectors only")
    return products[request.param]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit but for what a NaN carries."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def test_builds_differ_in_what_they_use(products: dict[str, Product]) -> None:
    """So that the tests below compare different code."""
    if "pairs-256" not in products:
        pytest.skip("one kind of vectors only")
    assert products["plain"].activation_bytes == 1
    assert products["pairs-256"].width == 8
    assert products["pairs-512"].width == products["machine"].width


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("n", "k", "group"), _SHAPES)
def test_store_and_add_are_the_plain_product(product: Product, n: int, k: int, group: int | None, rows: int) -> None:
    x, weight, bias, before = _rows(rows, k), _random(n, k, seed=4), _random(n, seed=5), _random(rows, n, seed=6)
    weight[0] = 0
    packed, quantised = pack_linear_int8(weight, group), quantize_weight(weight, group)
    empty = torch.full((rows, n), 5.0)
    assert _equal(product.multiply(x, packed, n, empty.clone()), linear_int8(x, *quantised))
    expected = linear_int8(x, *quantised, bias)
    assert _equal(product.multiply(x, packed, n, empty.clone(), bias=bias), expected)
    added = product.multiply(x, packed, n, before.clone(), Into.ADD, bias)
    assert _equal(added, before + expected)


@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (95, 192), (576, 576)])
def test_codes_of_four_bits(product: Product, n: int, k: int, rows: int) -> None:
    x, codes, bias, before = _rows(rows, k), random_codes(n, k), _random(n, seed=5), _random(rows, n, seed=6)
    panels = pack_fours(codes.floats())
    assert panels is not None
    assert _equal(product.multiply(x, (panels, None), n, torch.full((rows, n), 5.0)), linear_codes(x, codes))
    added = product.multiply(x, (panels, None), n, before.clone(), Into.ADD, bias)
    assert _equal(added, before + linear_codes(x, codes, bias))


@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, None), (16, 64, 32), (24, 64, None), (160, 576, 192)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up(
    products: dict[str, Product], n: int, k: int, group: int | None, rows: int, has_bias: bool
) -> None:
    x, gate, up = _random(rows, k), _random(n, k, seed=4), _random(n, k, seed=5)
    gate_bias, up_bias = _random(n, seed=6) * has_bias, _random(n, seed=7) * has_bias
    bias = gate_up_rows(gate_bias[:, None], up_bias[:, None]).flatten() if has_bias else None
    packed = pack_linear_int8(gate_up_rows(gate, up), group)
    outputs = [product.multiply(x, packed, 2 * n, torch.empty(rows, n), Into.SWIGLU, bias)
               for product in products.values()]  # fmt: skip
    gates = linear_int8(x, *quantize_weight(gate, group), gate_bias)
    ups = linear_int8(x, *quantize_weight(up, group), up_bias)
    exact = torch.nn.functional.silu(gates.double()) * ups.double()
    torch.testing.assert_close(outputs[0].double(), exact, rtol=1e-6, atol=1e-30)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("into", list(Into))
def test_a_row_does_not_see_its_company_or_the_lanes(products: dict[str, Product], into: Into, is_coded: bool) -> None:
    product, n, k, most = products["machine"], 130, 192, 150
    width = n // 2 if into is Into.SWIGLU else n
    x, before = _rows(most, k), _random(most, width, seed=5)
    floats = random_codes(160, k).floats()
    packed = (pack_fours(floats), None) if is_coded else pack_linear_int8(floats, 96)
    one_by_one = before.clone()
    for i in range(most):
        product.multiply(x[i : i + 1], packed, n, one_by_one[i : i + 1], into, lanes=1)
    for lanes in (1, 2, 3):
        for rows in (*range(1, 20), 71, most):
            for first in (0, most - rows):
                part = slice(first, first + rows)
                y = product.multiply(x[part], packed, n, before[part].clone(), into, lanes=lanes)
                assert _equal(y, one_by_one[part]), (lanes, rows, first)


def test_strides_do_not_show_and_nothing_else_is_written(product: Product) -> None:
    x, packed = _random(21, 64), pack_linear_int8(_random(70, 64, seed=4))
    expected = product.multiply(x, packed, 70, torch.empty(21, 70))
    wide, out = torch.full((21, 80), torch.nan), torch.full((21, 97), 7.0)
    wide[:, :64] = x
    product.multiply(wide[:, :64], packed, 70, out[:, :70])
    assert torch.equal(out[:, :70], expected)
    assert (out[:, 70:] == 7.0).all()


def test_no_rows(product: Product) -> None:
    packed = pack_linear_int8(_random(32, 32))
    assert product.multiply(torch.empty(0, 32), packed, 32, torch.empty(0, 32)).shape == (0, 32)


def test_the_largest_sums_are_exact(product: Product) -> None:
    """All products of a group at their limit and of one sign, where sums of 16 bits would saturate."""
    for sign in (1.0, -1.0):
        x, weight = torch.full((2, 64), sign * 127.0), torch.full((33, 64), 127.0)
        assert (product.multiply(x, pack_linear_int8(weight), 33, torch.empty(2, 33)) == sign * 64 * 127 * 127).all()


@pytest.mark.parametrize("group", [None, 32])
def test_embeddings(product: Product, group: int | None) -> None:
    table = _random(45, 96)
    packed, quantised = pack_linear_int8(table, group), quantize_weight(table, group)
    for token in (0, 31, 32, 44):
        assert torch.equal(product.embed(packed, 45, token), embed_int8(torch.tensor([token]), *quantised)[0])


@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, None), (31, 64, 32), (64, 96, 96)])
def test_packing_comes_back_and_fills_with_zeros(n: int, k: int, group: int | None) -> None:
    weight = _random(n, k)
    panels, scales = pack_linear_int8(weight, group)
    values, expected = quantize_weight(weight, group)
    blocks = -(-n // 32)
    assert panels.shape == (blocks, k // 4, 32, 4) and panels.is_contiguous() and panels.dtype == torch.uint8
    assert scales.shape == (blocks, k // (group or k), 32) and scales.is_contiguous()
    assert torch.equal(unpack_int8(panels, n), values)
    assert torch.equal(scales.transpose(1, 2).flatten(0, 1)[:n], expected)
    assert not unpack_int8(panels, blocks * 32)[n:].any() and not scales.transpose(1, 2).flatten(0, 1)[n:].any()


def test_gate_and_up_lie_side_by_side() -> None:
    gate, up = torch.arange(1.0, 41.0)[:, None].expand(40, 32), torch.arange(101.0, 141.0)[:, None].expand(40, 32)
    panels, scales = pack_linear_int8(gate_up_rows(gate, up))
    assert panels.shape == (3, 8, 32, 4)
    assert (scales[1, 0] * 127).round().tolist() == [*range(17, 33), *range(117, 133)]
    assert (scales[2, 0] * 127).round().tolist() == [*range(33, 41), *[0] * 8, *range(133, 141), *[0] * 8]


def test_features_without_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        pack_linear_int8(torch.ones(4, 48))
