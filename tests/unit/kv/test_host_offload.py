"""Test which blocks host memory keeps and in which order it evicts them, with and without a device pool."""

from __future__ import annotations

import pytest

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored
from tandem.core.ids import BlockHash, BlockId
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.host_offload import HostBlockPool, Offload, Onload

A, B, C, D = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c", b"d"))


def block(number: int) -> BlockId:
    return BlockId(number)


def hold(pool: HostBlockPool, *names: BlockHash) -> None:
    """Keep hashes without parents in the pool, and finish their copies."""
    for i, name in enumerate(names):
        pool.keep(name, None, block(i))
    pool.end_copies(*pool.take_copies())


def test_first_offloaded_block_is_evicted_first() -> None:
    pool = HostBlockPool(2)
    hold(pool, A, B)
    kept = pool.keep(C, None, block(7))
    assert kept.facts == [BlockEvicted(A), BlockOffloaded(C)] and kept.is_copied
    assert pool.take_copies() == (((7, 0),), ())
    assert list(pool._sole) == [B, C]


def test_spare_slots_are_reused_first_and_need_no_second_copy() -> None:
    pool = HostBlockPool(2)
    hold(pool, A, B)
    pool.end_copies(*_onloaded(pool, B))
    assert B not in pool and pool.num_held == 1
    assert pool.keep(B, None, block(3)).facts == [BlockOffloaded(B)] and pool.take_copies() == ((), ()), "it was here"
    pool.end_copies(*_onloaded(pool, B))
    assert pool.keep(C, None, block(4)).facts == [BlockOffloaded(C)] and A in pool
    pool.check({B}, ())


def _onloaded(pool: HostBlockPool, name: BlockHash) -> tuple[tuple[Offload, ...], tuple[Onload, ...]]:
    pool.fill(pool.claim([name]), [block(5)])
    return pool.take_copies()


def test_too_many_offloads_keep_the_beginning_of_a_prompt() -> None:
    """Offload four blocks of one prompt in one step, last block first; two slots keep the beginning of the prompt."""
    pool = HostBlockPool(2)
    parents = {A: None, B: A, C: B, D: C}
    dropped = [kept.dropped for name in (D, C, B, A) for kept in [pool.keep(name, parents[name], block(ord(name[:1])))]]
    assert list(pool._sole) == [B, A] and dropped == [(), (), (ord("d"),), (ord("c"),)]
    assert pool.take_copies() == (((ord("b"), 0), (ord("a"), 1)), ())


def test_a_slot_of_an_open_plan_is_not_written_again() -> None:
    pool = HostBlockPool(1)
    pool.keep(A, None, block(0))
    copies = pool.take_copies()
    kept = pool.keep(B, None, block(1))
    assert kept.facts == [BlockEvicted(B)] and not kept.is_copied
    pool.end_copies(*copies)
    assert pool.keep(B, None, block(1)).facts == [BlockEvicted(A), BlockOffloaded(B)]


def test_lost_block_takes_its_descendants_along() -> None:
    """Lose A while the copy of its child B is being made: the slot of B is free only after that copy."""
    pool = HostBlockPool(1)
    pool.keep(B, A, block(1))
    copies = pool.take_copies()
    assert pool.keep(A, None, block(0)).facts == [BlockEvicted(B), BlockEvicted(A)]
    pool.check((), [slot for _, slot in copies[0]])
    assert pool.keep(C, None, block(2)).facts == [BlockEvicted(C)], "its copy is still under way"
    pool.end_copies(*copies)
    pool.check((), ())
    assert pool.keep(C, None, block(2)).is_copied


def test_a_pool_without_slots_keeps_nothing_and_less_is_refused() -> None:
    assert HostBlockPool(0).keep(A, None, block(0)).facts == [BlockEvicted(A)]
    with pytest.raises(ValueError, match="-1 host slots"):
        HostBlockPool(-1)


def test_prefix_is_onloaded_into_fresh_blocks() -> None:
    pool = BlockPool(3, 1, records_facts=True, num_host_slots=3)
    table, other = BlockTable(), BlockTable()
    pool.grow(table, 2)
    pool.publish(table, [A, B])
    pool.release(table)
    pool.grow(other, 2)
    spills, fills = pool.host.take_copies()
    assert [name for name, _ in spills] == [1] and not fills, "one block was never used, and the last goes first"
    assert pool.count_hits([A, B]) == 2 and pool.num_free_needed([A, B], 2) == 2
    pool.check([other], (), (), (1,), [slot for _, slot in spills])
    pool.end_copies(spills, fills)
    pool.release(other)
    assert pool.share(table, [A, B, C]) == 2 == table.num_published
    spills, fills = pool.host.take_copies()
    assert not spills and fills == ((0, table.ids()[1]),) and table.ids()[0] == 0
    pool.end_copies(spills, fills)
    facts = [BlockStored(A, None), BlockStored(B, A), BlockOffloaded(B), BlockStored(B, A)]
    assert pool.take_events() == facts
    pool.release(table)
    pool.check((), (), ())


def test_a_block_that_is_copied_out_is_held_until_then() -> None:
    pool = BlockPool(1, 1, num_host_slots=1)
    table = BlockTable()
    pool.grow(table, 1)
    pool.publish(table, [A])
    pool.release(table)
    assert pool.num_free == 1 and pool.num_free_at_once == 0
    assert pool.grow(table, 1)
    pool.trim(table, 0)
    assert pool.num_free == 0 and pool.holders(block(0)) == (0, 0, 0, 1), "a read must not be let in yet"
    pool.end_copies(*pool.host.take_copies())
    assert pool.num_free == pool.num_free_at_once == 1
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.retain([block(0)], Holder.READ)


def test_a_slot_that_is_written_to_a_file_is_skipped_and_so_is_its_parent() -> None:
    """B, the child of A, is the oldest: as long as its slot is in use, A cannot go either, but C can."""
    pool = HostBlockPool(3, keeps_files=True)
    for name, parent in ((B, A), (A, None), (C, None)):
        pool.keep(name, parent, block(1))
    pool.end_copies(*pool.take_copies())
    ((slot, name),) = pool.take_writes(1)
    assert name == B
    assert pool.keep(D, None, block(2)).facts == [BlockEvicted(C), BlockOffloaded(D)]
    pool.unpin([slot])
    pool.end_copies(*pool.take_copies())
    pool.check((), ())
    assert [written for _, written in pool.take_writes(9)] == [A, D], "C went before it was written"


def test_blocks_read_from_files_go_after_their_children_and_keep_the_blocks_before_them() -> None:
    pool = BlockPool(3, 1, records_facts=True, num_host_slots=3)
    hold(pool.host, A, D)
    slots = pool.reserve_slots([A, B, C], 1)
    assert len(slots) == 2 and A in pool.host and D not in pool.host
    assert pool.take_events() == [BlockEvicted(D)]
    pool.admit([A, B], slots[:1])
    pool.admit([A, B, C], slots[1:])
    assert pool.take_events() == [BlockStored(B, A), BlockOffloaded(B), BlockStored(C, B), BlockOffloaded(C)]
    assert list(pool.host._sole) == [C, B, A] and pool.count_hits([A, B, C]) == 3
    pool.check((), (), ())


def test_blocks_read_from_files_may_take_the_slot_of_a_block_that_is_on_the_device_again() -> None:
    """A prefix hit copied A back to the device; its spare slot is then free for B, which follows A and is in a file."""
    pool = BlockPool(1, 1, num_host_slots=1)
    table = BlockTable()
    pool.grow(table, 1)
    pool.publish(table, [A])
    pool.release(table)
    pool.grow(table, 1)
    pool.end_copies(*pool.host.take_copies())
    pool.release(table)
    assert pool.share(table, [A]) == 1
    pool.end_copies(*pool.host.take_copies())
    slots = pool.reserve_slots([A, B], 1)
    assert slots == [0]
    pool.admit([A, B], slots)
    assert pool.count_hits([A, B]) == 2
    pool.check([table], (), ())


def test_blocks_read_from_files_are_dropped_without_the_block_before_them() -> None:
    pool = BlockPool(3, 1, num_host_slots=3)
    slots = pool.reserve_slots([A, B], 0)
    pool.admit([A, B, C, D], slots[:1])
    assert pool.count_hits([A]) == 0 and pool.host.num_held == 0
    pool.admit([A], slots[1:])
    pool.check((), (), ())
    assert pool.count_hits([A, B]) == 1


def test_files_reach_as_far_as_they_hold_every_block() -> None:
    pool = BlockPool(3, 1, num_host_slots=3)
    pool.host.in_files.update((A, B, D))
    assert pool.count_reachable([A, B, C, D]) == 2
    hold(pool.host, A)
    assert pool.count_reachable([A, B, C, D]) == 2 and pool.count_reachable([C]) == 0
