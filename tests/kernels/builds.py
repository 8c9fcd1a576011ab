"""Compiles products of the kernels' sources without some instructions, and calls them; tests nothing itself."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Mapping
from ctypes import byref, c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from tandem_kernels.native import build
from tandem_kernels.native.library import CMatrix, Into

FLOAT_PRODUCT = """
#include "linear.hpp"
extern "C" void multiply(int lanes, const float* x, int ldx, int m, const tandem::Matrix* w, float* y, int ldy,
                         int into) {
    tandem::Team team(lanes);
    team.run([&](tandem::Lane& lane) {
        tandem::linear(lane, x, ldx, m, *w, y, ldy, static_cast<tandem::Into>(into));
    });
}
"""
INT8_PRODUCT = """
#include "linear_int8.hpp"
#include <vector>
#if defined(TANDEM_BYTE_PRODUCT)
extern "C" int has_byte_product() { return 1; }
#else
extern "C" int has_byte_product() { return 0; }
#endif
extern "C" void multiply_int8(int lanes, const float* x, int ldx, int m, const tandem::Matrix* w, float* y, int ldy,
                              int into) {
    const int k = w->k;
    std::vector<tandem::Activation> values(std::size_t(m) * k);
    std::vector<float> scales(std::size_t(m) * k / tandem::kRowGroup);
    std::vector<std::int32_t> sums(std::size_t(m) * k / tandem::kSumGroup);
    const tandem::Int8Rows rows{values.data(), scales.data(), sums.data(), k};
    tandem::Team team(lanes);
    team.run([&](tandem::Lane& lane) {
        tandem::quantize_rows(lane, x, ldx, m, rows);
        lane.wait();
        tandem::linear(lane, rows, m, *w, y, ldy, static_cast<tandem::Into>(into));
    });
}
"""
_COMMON = """
#include "coded.hpp"
extern "C" int width() { return tandem::kWidth; }
extern "C" void embed(const tandem::Matrix* w, std::int64_t token, float* out) { tandem::embed_row(*w, token, out); }
"""


class Product:
    """One build of products: `parts` of the source, compiled with some flags more than the product's own."""

    def __init__(self, parts: str, flags: tuple[str, ...], folder: Path) -> None:
        source, target = folder / "products.cpp", folder / "products.so"
        source.write_text(parts + _COMMON)
        command = [build._find_compiler(), *build._FLAGS, *flags, f"-I{build._SOURCES}", str(source)]
        subprocess.run([*command, "-o", str(target)], check=True, timeout=300)
        self.library = ctypes.CDLL(str(target))

    def multiply(self, x: torch.Tensor, matrix: CMatrix, y: torch.Tensor, into: Into) -> torch.Tensor:
        """Multiply float rows into `y` and return it; rows of both may lie farther apart than they are long."""
        return self._multiply("multiply", x, matrix, y, into)

    def multiply_int8(
        self, x: torch.Tensor, matrix: CMatrix, y: torch.Tensor, into: Into = Into.STORE, lanes: int = 2
    ) -> torch.Tensor:
        """Quantise the rows and multiply them into `y`, and return it."""
        return self._multiply("multiply_int8", x, matrix, y, into, lanes)

    def _multiply(
        self, name: str, x: torch.Tensor, matrix: CMatrix, y: torch.Tensor, into: Into, lanes: int = 2
    ) -> torch.Tensor:
        getattr(self.library, name)(
            c_int(lanes), _pointer(x), c_int(x.stride(0)), c_int(len(x)), byref(matrix), _pointer(y),
            c_int(y.stride(0)), c_int(int(into)),
        )  # fmt: skip
        return y

    def embed(self, matrix: CMatrix, token: int) -> torch.Tensor:
        """Return row `token` of a packed table, as floats."""
        out = torch.empty(matrix.k)
        self.library.embed(byref(matrix), c_int64(token), _pointer(out))
        return out


class Builds:
    """Builds of products by name, each compiled when a test first asks for it. `without` are the flags of each."""

    def __init__(self, parts: str, without: Mapping[str, tuple[str, ...]], folder: Path) -> None:
        self._parts, self._without, self._folder = parts, without, folder
        self._found: dict[str, Product] = {}

    def __getitem__(self, name: str) -> Product:
        """Return the build; skip the test where the machine has one kind of vectors only."""
        if self._without[name] and platform.machine() != "x86_64":
            pytest.skip("one kind of vectors only")
        if name not in self._found:
            folder = self._folder / name
            folder.mkdir()
            self._found[name] = Product(self._parts, self._without[name], folder)
        return self._found[name]


def _pointer(tensor: torch.Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
