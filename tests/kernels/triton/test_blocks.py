"""Packed blocks and digests in Triton equal the plain ones bit by bit, whatever the sizes of the words."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.contract import FLOAT8
from tandem_kernels.native import library
from tandem_kernels.triton import KERNELS
from tests.kernels.triton.tensors import pool_of

# blocks, heads, layers, block size, head size; type. Slabs of 8, 4, 2 bytes and of one, beside whole ones.
_SHAPES = [
    ((6, 3, 4, 16, 64), torch.bfloat16),
    ((5, 4, 2, 32, 80), torch.float16),
    ((4, 2, 1, 16, 96), torch.float32),
    ((3, 1, 2, 16, 128), FLOAT8),
    ((4, 8, 1, 1, 8), torch.float64),
    ((4, 3, 1, 1, 3), torch.float32),
    ((4, 3, 1, 1, 3), torch.float16),
    ((4, 3, 1, 1, 1), torch.float16),
    ((4, 3, 1, 1, 1), torch.uint8),
]


def _pool(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.uint8:
        return pool_of(shape, dtype)
    return torch.arange(4 * 3 * 2, dtype=torch.uint8).view(4, 3, 1, 2, 1, 1)


@pytest.mark.parametrize(("shape", "dtype"), _SHAPES)
@pytest.mark.parametrize("blocks", [[], [1], [3, 0, 2]], ids=len)
def test_pack_and_unpack(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, blocks: list[int], device: torch.device
) -> None:
    pool, other = _pool(shape, dtype), _pool(shape, dtype).flip(0).contiguous()
    ids = torch.tensor([b % shape[0] for b in blocks], dtype=torch.int64)
    heads = shape[1]
    for start, stop in {(0, heads), (0, 1), (heads - 1, heads), (heads // 2, heads)}:
        packed = KERNELS.pack_blocks(pool.to(device), ids.to(device), start, stop)
        assert packed.is_contiguous()
        assert torch.equal(packed.cpu(), reference.pack_blocks(pool, ids, start, stop))
        expected, got = other.clone(), other.to(device, copy=True)
        reference.unpack_blocks(packed.cpu(), expected, ids, start)
        KERNELS.unpack_blocks(packed, got, ids.to(device), start)
        assert torch.equal(got.cpu(), expected), "and nothing else is written"


def test_packed_heads_may_be_a_part_of_all_heads(device: torch.device) -> None:
    """A rank's share of what a worker with fewer ranks has packed."""
    packed, pool, ids = (
        pool_of((2, 4, 2, 16, 64), torch.bfloat16),
        torch.zeros(3, 2, 2, 2, 16, 64),
        torch.tensor([2, 0]),
    )
    pool = pool.bfloat16().to(device)
    KERNELS.unpack_blocks(packed.to(device)[:, 1:3], pool, ids.to(device), 0)
    assert torch.equal(pool[ids].cpu(), packed[:, 1:3])
    assert not pool[1].any()


@pytest.mark.parametrize(("shape", "dtype"), [case for case in _SHAPES[:5] if case[1] != torch.uint8])
def test_digest(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    pool = pool_of(shape, dtype)
    ids, indices = torch.tensor([2, 0, 1]), torch.tensor([4, 9, 1 << 20])
    expected = reference.block_digest(pool, ids, indices, head_start=3)
    got = KERNELS.block_digest(pool.to(device), ids.to(device), indices.to(device), head_start=3)
    assert torch.equal(got.cpu(), expected)
    if dtype != FLOAT8:
        assert torch.equal(library.block_digest(pool, ids, indices, head_start=3), expected)


def test_digest_over_several_programs(device: torch.device) -> None:
    """Slabs that no one program reads: one of them ends within a program's part, one with it."""
    for words in (8192, 8193, 20_000):
        pool = torch.randint(-(1 << 62), 1 << 62, (2, 1, words), generator=torch.Generator().manual_seed(words))
        ids, indices = torch.tensor([1]), torch.tensor([0])
        got = KERNELS.block_digest(pool.to(device), ids.to(device), indices.to(device))
        assert torch.equal(got.cpu(), reference.block_digest(pool, ids, indices))


def test_digest_of_nothing_is_nothing(device: torch.device) -> None:
    none = torch.tensor([], dtype=torch.int64, device=device)
    assert KERNELS.block_digest(torch.zeros(2, 3, 8, device=device), none, none).shape == (0, 3)


def test_ragged_slab_is_refused(device: torch.device) -> None:
    pool, ids = torch.zeros((1, 1, 1, 2, 1, 3), dtype=torch.float16, device=device), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="12 bytes"):
        KERNELS.block_digest(pool, ids.to(device), ids.to(device))
