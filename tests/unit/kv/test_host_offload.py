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
