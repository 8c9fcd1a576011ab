"""Test the order in which free blocks are reused, and the size of the list."""

from __future__ import annotations

import pytest

from tandem.core.ids import BlockId
from tandem.kv.free_list import LEAST_STALE, FreeList


def free_list(number: int) -> FreeList:
    return FreeList(tuple(BlockId(i) for i in range(number)))


def test_unhashed_blocks_go_first_then_unused_then_hashed_by_age() -> None:
    one = free_list(6)
    for block in one.take(4):
        one.free(block, is_hashed=block < 2)
    assert list(one) == [3, 2, 4, 5, 0, 1] and len(one) == 6 and one.num_hashed == 2
    assert one.take(5) == [3, 2, 4, 5, 0] and list(one) == [1]
    with pytest.raises(IndexError, match="2 of 1"):
        one.take(2)
    assert list(one) == [1], "and none was taken"


def test_removed_block_is_added_at_the_end_again() -> None:
    one = free_list(3)
    for block in one.take(3):
        one.free(block, is_hashed=True)
    one.remove(BlockId(0))
    assert list(one) == [1, 2] and len(one) == 2
    one.free(BlockId(0), is_hashed=True)
    assert list(one) == [1, 2, 0] and one.take(3) == [1, 2, 0] and len(one) == 0


def test_repeated_hits_leave_few_stale_entries() -> None:
    one = free_list(4)
    for block in one.take(4):
        one.free(block, is_hashed=True)
    for _ in range(50 * LEAST_STALE):
        one.remove(BlockId(2))
        one.free(BlockId(2), is_hashed=True)
    assert len(one._hashed._blocks) < 3 * LEAST_STALE and list(one) == [0, 1, 3, 2]


def test_retained_blocks_go_last_until_they_are_moved_back() -> None:
    one = free_list(4)
    for block in one.take(4):
        one.free(block, is_hashed=True, is_retained=block == 0)
    assert list(one) == [1, 2, 3, 0] and one.num_hashed == 4
    one.move(BlockId(2), is_retained=True)
    one.move(BlockId(0), is_retained=False)
    assert list(one) == [1, 3, 0, 2]
    one.remove(BlockId(2), is_retained=True)
    assert one.take(3) == [1, 3, 0] and len(one) == 0
