"""Block digests: equal to their definition, and every swap of parts trips them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tandem_kernels.reference import block_digest

_SHAPE = (5, 3, 4, 2, 8, 16)  # blocks, heads, layers, planes, slots, head_dim
_MASK = (1 << 64) - 1


def _pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(11)).to(dtype)


def _digest(pool: torch.Tensor, blocks: list[int], indices: list[int]) -> list[list[int]]:
    words: list[list[int]] = block_digest(pool, torch.tensor(blocks), torch.tensor(indices)).tolist()
    return words


def _by_definition(slab: bytes, head: int, index: int) -> int:
    """The contract's formula in Python's integers."""
    total = 0
    for j in range(len(slab) // 8):
        word = int.from_bytes(slab[8 * j : 8 * j + 8], "little") ^ (j * 0x9E3779B97F4A7C15 & _MASK)
        x = word * 0xBF58476D1CE4E5B9 & _MASK
        signed = x - (1 << 64) if x >> 63 else x
        total += x ^ (signed >> 32 & _MASK)
    return (total + (head + 1) * 0x94D049BB133111EB + (index + 1) * 0xD6E8FEB86659FD93) & _MASK


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_digest_equals_its_definition(dtype: torch.dtype) -> None:
    pool = _pool(dtype)
    digests = _digest(pool, [3, 0], [7, 2])
    for row, (block, index) in enumerate(((3, 7), (0, 2))):
        for head in range(_SHAPE[1]):
            slab = pool[block, head].contiguous().view(torch.uint8).numpy().tobytes()
            assert digests[row][head] & _MASK == _by_definition(slab, head, index)


def test_heads_are_numbered_by_the_model() -> None:
    pool, block, index = _pool(), torch.tensor([1]), torch.tensor([0])
    whole = block_digest(pool, block, index)
    part = block_digest(pool[:, 1:].contiguous(), block, index, head_start=1)
    assert torch.equal(whole[:, 1:], part)


def _swap(pool: torch.Tensor, first: tuple[object, ...], second: tuple[object, ...]) -> None:
    kept = pool[first].clone()  # type: ignore[index]
    pool[first] = pool[second]  # type: ignore[index]
    pool[second] = kept  # type: ignore[index]


_ALL = slice(None)
_FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "two layers": lambda p: _swap(p, (2, _ALL, 0), (2, _ALL, 3)),
    "two heads": lambda p: _swap(p, (2, 0), (2, 2)),
    "two tokens": lambda p: _swap(p, (2, _ALL, _ALL, _ALL, 0), (2, _ALL, _ALL, _ALL, 1)),
    "two tokens of one layer": lambda p: _swap(p, (2, 0, 1, 0, 3), (2, 0, 1, 0, 4)),
    "key and value": lambda p: _swap(p, (2, _ALL, _ALL, 0), (2, _ALL, _ALL, 1)),
    "two blocks": lambda p: _swap(p, (2,), (3,)),
    "a lost write": lambda p: p[2, 1, 3, 1, 7].zero_(),
    "one sign": lambda p: p[2, 1, 3, 1, 7, 5].neg_(),
}


@pytest.mark.parametrize("fault", _FAULTS.values(), ids=_FAULTS.keys())
def test_fault_trips_the_digest(fault: Callable[[torch.Tensor], object]) -> None:
    pool = _pool()
    before = _digest(pool, [2, 3], [0, 1])
    fault(pool)
    assert _digest(pool, [2, 3], [0, 1]) != before


def test_swap_of_equal_magnitudes_with_other_signs_trips() -> None:
    """Two words that differ in their top bit only cancel in a plain weighted sum."""
    pool = _pool()
    pool[2, 0, 0, 0, 0, 0:2] = torch.tensor([1.0, 2.0])
    pool[2, 0, 0, 0, 0, 2:4] = torch.tensor([1.0, -2.0])
    before = _digest(pool, [2], [0])
    pool[2, 0, 0, 0, 0, 1], pool[2, 0, 0, 0, 0, 3] = -2.0, 2.0
    assert _digest(pool, [2], [0]) != before


def test_a_right_block_in_the_wrong_place_trips() -> None:
    pool = _pool()
    assert _digest(pool, [2], [0]) != _digest(pool, [2], [1])


def test_equal_heads_have_different_digests() -> None:
    pool = _pool()
    pool[2, 1] = pool[2, 0]
    (heads,) = _digest(pool, [2], [0])
    assert heads[0] != heads[1]


def test_same_block_elsewhere_has_the_same_digest() -> None:
    pool = _pool()
    before = _digest(pool, [2], [6])
    pool[4] = pool[2]
    assert _digest(pool, [4], [6]) == before


def test_ragged_slab_is_refused() -> None:
    pool = torch.zeros((1, 1, 1, 2, 1, 3), dtype=torch.float16)
    with pytest.raises(ValueError, match="12 bytes"):
        _digest(pool, [0], [0])
