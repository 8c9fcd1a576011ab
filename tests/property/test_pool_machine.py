"""The block pool under random tables, forks, leases, reads and copies, against a plain list of who holds what."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tandem.core.events import BlockEvicted, BlockStored
from tandem.core.ids import BlockHash, BlockId
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.kv.pool import BlockPool, BlockTable, Holder
from tests.property.effort import effort

BLOCK_SIZE = 2
ROOT = root_hash("model", BLOCK_SIZE, "")


@dataclass(eq=False)
class Owner:
    """A table, the names of its full blocks, and what else holds them in its stead."""

    hashes: list[BlockHash]
    table: BlockTable = field(default_factory=BlockTable)


@dataclass(eq=False)
class Hold:
    blocks: tuple[BlockId, ...]
    holder: Holder


class PoolMachine(RuleBasedStateMachine):
    owners = Bundle("owners")
    holds = Bundle("holds")

    @initialize(num_blocks=st.integers(1, 9), caching=st.sampled_from([True, True, True, False]))
    def start(self, num_blocks: int, caching: bool) -> None:
        self.caching = caching
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching, records_facts=True)
        self.live: list[Owner] = []
        self.held: list[Hold] = []
        self.present: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()
        # What each physical block holds, written as a sequence computes it.
        self.content: dict[BlockId, BlockHash | None] = {}

    @rule(target=owners, branch=st.integers(0, 3), shared=st.integers(0, 4))
    def open_table(self, branch: int, shared: int) -> Owner:
        """A prompt of up to six full blocks that has its first `shared` in common with its sisters."""
        tokens = [0] * (shared * BLOCK_SIZE) + [branch] * ((6 - shared) * BLOCK_SIZE)
        owner = Owner(chain_hashes(ROOT, tokens, BLOCK_SIZE))
        self.live.append(owner)
        return owner

    @rule(owner=owners, stop=st.integers(0, 6), extra=st.integers(0, 3))
    def share_and_grow(self, owner: Owner, stop: int, extra: int) -> None:
        if len(owner.table) or owner not in self.live:
            return
        hashes = owner.hashes[:stop]
        num_hits = self.pool.count_hits(hashes)
        # A hit is a run from the first block on, and all of it is really there.
        assert num_hits == next((i for i, h in enumerate(hashes) if h not in self.present), len(hashes))
        needed, free = self.pool.num_free_needed(hashes, num_hits + extra), self.pool.num_free
        assert self.pool.share(owner.table, hashes) == num_hits == owner.table.num_published
        assert [self.content[b] for b in owner.table.ids()] == hashes[:num_hits], "a hit holds something else"
        if self.grow(owner, num_hits + extra):
            assert free - self.pool.num_free == needed, "the room was counted wrong"
        else:
            assert needed > free, "there was room"

    @rule(owner=owners, more=st.integers(1, 4))
    def grow_more(self, owner: Owner, more: int) -> None:
        if owner in self.live:
            self.grow(owner, len(owner.table) + more)

    def grow(self, owner: Owner, num_blocks: int) -> bool:
        before, free = owner.table.ids(), self.pool.free_blocks()
        missing = num_blocks - len(before)
        grown = self.pool.grow(owner.table, num_blocks)
        assert grown == (missing <= len(free))
        fresh = owner.table.ids()[len(before) :]
        assert owner.table.ids()[: len(before)] == before
        # Least recently freed first; what has no name before all that has one.
        assert list(fresh) == list(free[: len(fresh)]) and len(fresh) == (missing if grown else 0)
        for block in fresh:
            self.content[block] = None
        return grown

    @rule(owner=owners, num=st.integers(0, 6))
    def publish(self, owner: Owner, num: int) -> None:
        # Bytes that still arrive are not published, nor what others would write into.
        read = {b for h in self.held if h.holder is Holder.READ for b in h.blocks}
        table, first = owner.table, owner.table.num_published
        shut = (i for i, b in enumerate(table.ids()) if b in read or (i >= first and self.pool.is_shared(table, i)))
        limit = next(shut, len(table))
        num = max(owner.table.num_published, min(num, limit, len(owner.hashes)))
        for i in range(owner.table.num_published, num):
            self.content[owner.table.ids()[i]] = owner.hashes[i]
        self.pool.publish(owner.table, owner.hashes[:num])
        assert owner.table.num_published == (num if self.caching else 0)

    @rule(owner=consumes(owners))
    def release(self, owner: Owner) -> None:
        self.pool.release(owner.table)
        assert not len(owner.table) and not owner.table.num_published
        self.live.remove(owner)

    @rule(target=owners, owner=owners)
    def fork(self, owner: Owner) -> Owner:
        other = Owner(owner.hashes)
        self.pool.fork(other.table, owner.table)
        assert other.table.ids() == owner.table.ids() and other.table.num_published == owner.table.num_published
        self.live.append(other)
        return other

    @rule(target=holds, owner=owners, index=st.integers(0, 6))
    def own(self, owner: Owner, index: int) -> Hold:
        """Who shares a block that has no name yet takes a copy of it."""
        table, free = owner.table, self.pool.free_blocks()
        if not table.num_published <= index < len(table) or not self.pool.is_shared(table, index):
            return multiple()  # type: ignore[return-value]
        before = table.ids()
        copy = self.pool.own(table, index)
        if copy is None:
            assert not free and table.ids() == before
            return multiple()  # type: ignore[return-value]
        source, target = copy
        assert (source, target) == (before[index], free[0]) and not self.pool.is_shared(table, index)
        assert table.ids() == (*before[:index], target, *before[index + 1 :])
        self.content[target] = self.content[source]
        hold = Hold((source,), Holder.COPY)
        self.held.append(hold)
        return hold

    @rule(owner=owners, num=st.integers(0, 6))
    def trim(self, owner: Owner, num: int) -> None:
        num = max(num, owner.table.num_published)
        before = owner.table.ids()
        self.pool.trim(owner.table, num)
        assert owner.table.ids() == before[:num]

    @rule(target=holds, owner=owners, first=st.integers(0, 6), holder=st.sampled_from([Holder.LEASE, Holder.READ]))
    def retain(self, owner: Owner, first: int, holder: Holder) -> Hold:
        """A lease holds a table's prefix; a read only blocks that have no name yet."""
        blocks = owner.table.ids() if holder is Holder.LEASE else owner.table.ids()[owner.table.num_published :]
        hold = Hold(blocks[:first] if holder is Holder.LEASE else blocks[first:], holder)
        if not hold.blocks:
            return multiple()  # type: ignore[return-value]
        self.pool.retain(hold.blocks, holder)
        self.held.append(hold)
        return hold

    @rule(target=holds, owner=owners)
    def hand_over(self, owner: Owner) -> Hold:
        """A prefill ends, and only its lease is left."""
        hold = Hold(owner.table.ids(), Holder.LEASE)
        self.pool.retain(hold.blocks, Holder.LEASE)
        self.held.append(hold)
        self.pool.release(owner.table)
        return hold

    @rule(num=st.integers(1, 4))
    def churn(self, num: int) -> None:
        """Somebody takes the oldest blocks and lets them go at once."""
        owner = Owner([])
        if self.grow(owner, num):
            self.pool.release(owner.table)

    @rule(hold=consumes(holds))
    def drop(self, hold: Hold) -> None:
        self.pool.drop(hold.blocks, hold.holder)
        self.held.remove(hold)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        leased = [b for h in self.held if h.holder is Holder.LEASE for b in h.blocks]
        read = [b for h in self.held if h.holder is Holder.READ for b in h.blocks]
        copied = [b for h in self.held if h.holder is Holder.COPY for b in h.blocks]
        self.pool.check([o.table for o in self.live], leased, read, copied)
        busy = {b for o in self.live for b in o.table.ids()} | set(leased) | set(read) | set(copied)
        assert self.pool.num_free == self.pool.num_blocks - len(busy)
        assert self.pool.num_leased == len(set(leased)) and self.pool.num_reading == len(set(read))

    @invariant()
    def facts_replay_to_what_is_present(self) -> None:
        if not hasattr(self, "pool"):
            return
        for fact in self.pool.take_facts():
            match fact:
                case BlockStored(name, parent):
                    assert name not in self.present, "stored twice"
                    assert parent is None or parent in self.present, "stored before its parent"
                    self.present[name] = parent
                case BlockEvicted(name):
                    del self.present[name]
                    assert name not in self.present.values(), "a parent went before its child"
        assert set(self.present) == set(self.pool.names())
        for name in self.present:
            assert all(self.content[b] == name for b in self.pool.copies(name)), "a name stands on other content"


TestPool = PoolMachine.TestCase
TestPool.settings = effort(250, 70)
