"""Compiled row kernels and digests equal the plain ones, and bad tensors are refused before the call."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.native import library
from tests.kernels.codes import randn


@pytest.mark.parametrize("width", [1, 15, 16, 31, 48, 576, 1601])
def test_norm_is_the_plain_one(width: int) -> None:
    x, weight = randn(7, width) * 30, randn(width)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(library.rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-6)


def test_norm_of_zeros_is_zero() -> None:
    assert not library.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-5).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 4, 2, 8, 16), (4, 1, 1, 2, 8, 10), (3, 2, 3, 2, 16, 64)])
def test_digest_is_the_plain_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool = randn(*shape).to(dtype)
    blocks, indices = torch.tensor([2, 0, 1]), torch.tensor([4, 9, 0])
    expected = reference.block_digest(pool, blocks, indices, head_start=3)
    assert torch.equal(library.block_digest(pool, blocks, indices, head_start=3), expected)


def test_digest_of_nothing_is_nothing() -> None:
    none = torch.tensor([], dtype=torch.int64)
    assert library.block_digest(randn(2, 3, 1, 2, 8, 16), none, none).shape == (0, 3)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 32, dtype=torch.float64), torch.zeros(32, 4).T, torch.zeros(4, 64)[:, ::2]],
    ids=["type", "transposed", "strided"],
)
def test_memory_of_another_kind_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        library.rms_norm(tensor, torch.ones(32), 1e-5)


def test_odd_slabs_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 8"):
        library.block_digest(torch.zeros(1, 1, 1, 1, 1, 3), torch.tensor([0]), torch.tensor([0]))


def test_a_team_has_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one"):
        library.Team(0)
