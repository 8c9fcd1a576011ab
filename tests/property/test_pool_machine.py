"""The block pool under random tables, forks, leases, reads and copies, with and without host memory, against a plain
list of who holds what."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored
from tandem.core.ids import BlockHash, BlockId, HostSlot, TenantId
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.kv.host_offload import Offload, Onload
from tests.effort import effort

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

    @initialize(
        num_blocks=st.integers(1, 9),
        caching=st.sampled_from([True, True, True, False]),
        num_host_slots=st.sampled_from([0, 0, 1, 2, 3, 5, 9, 20]),
        max_retained_blocks=st.sampled_from([0, 1, 3, 9]),
    )
    def start(self, num_blocks: int, caching: bool, num_host_slots: int, max_retained_blocks: int) -> None:
        self.caching = caching
        self.now = 0.0
        self.pool = BlockPool(
            num_blocks,
            BLOCK_SIZE,
            enable_prefix_caching=caching,
            records_facts=True,
            num_host_slots=num_host_slots,
            max_retained_blocks=max_retained_blocks,
        )
        self.live: list[Owner] = []
        self.held: list[Hold] = []
        self.present: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()
        self.in_host: set[BlockHash] = set()
        # What each physical block holds, written as a sequence computes it, and each host slot.
        self.content: dict[BlockId, BlockHash | None] = {}
        self.host_content: dict[HostSlot, BlockHash | None] = {}
        self.plans: list[tuple[tuple[Offload, ...], tuple[Onload, ...]]] = []

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
        if needed > free:
            return
        assert self.pool.share(owner.table, hashes) == num_hits == owner.table.num_published
        is_grown = self.pool.grow(owner.table, num_hits + extra)
        assert is_grown and free - self.pool.num_free == needed, "the room was counted wrong"
        # A sharer's copies are made before anything reads what they bring, in the step that begins with it.
        self.take_copies()
        assert [self.content[b] for b in owner.table.ids(num_hits)] == hashes[:num_hits], "a hit holds something else"
        self.content.update(dict.fromkeys(owner.table.ids()[num_hits:]))

    def take_copies(self) -> None:
        """Copies happen in the order of the plans, so that the model may make them when they are planned."""
        spills, fills = self.pool.host.take_copies()
        assert len({slot for _, slot in spills}) == len(spills) and len({block for _, block in fills}) == len(fills)
        busy = {slot for spilt, _ in self.plans for _, slot in spilt}
        busy |= {slot for _, filled in self.plans for slot, _ in filled}
        assert busy.isdisjoint(slot for _, slot in spills), "a slot is written that an open plan copies"
        for block, slot in spills:
            self.host_content[slot] = self.content[block]
        for slot, block in fills:
            self.content[block] = self.host_content[slot]
        if spills or fills:
            self.plans.append((spills, fills))

    @rule()
    def commit(self) -> None:
        if self.plans:
            self.pool.end_copies(*self.plans.pop(0))

    @rule(owner=owners, more=st.integers(1, 4))
    def grow_more(self, owner: Owner, more: int) -> None:
        if owner in self.live:
            self.grow(owner, len(owner.table) + more)

    def grow(self, owner: Owner, num_blocks: int) -> bool:
        before, free = owner.table.ids(), tuple(self.pool._free)
        missing = num_blocks - len(before)
        grown = self.pool.grow(owner.table, num_blocks)
        assert grown == (missing <= len(free))
        fresh = owner.table.ids()[len(before) :]
        assert owner.table.ids()[: len(before)] == before
        # Least recently freed first; what has no name before all that has one.
        assert list(fresh) == list(free[: len(fresh)]) and len(fresh) == (missing if grown else 0)
        self.take_copies()
        self.content.update(dict.fromkeys(fresh))
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
        self.let_go(owner)
        self.live.remove(owner)

    def let_go(self, owner: Owner) -> None:
        """Whose blocks an open plan fills keeps them until it is over."""
        while {block for _, fills in self.plans for _, block in fills} & set(owner.table.ids()):
            self.commit()
        self.pool.release(owner.table)
        assert not len(owner.table) and not owner.table.num_published

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
        table, free = owner.table, tuple(self.pool._free)
        if not table.num_published <= index < len(table) or not self.pool.is_shared(table, index):
            return multiple()  # type: ignore[return-value]
        before = table.ids()
        copy = self.pool.make_exclusive(table, index)
        if copy is None:
            assert not free and table.ids() == before
            return multiple()  # type: ignore[return-value]
        source, target = copy
        assert (source, target) == (before[index], free[0]) and not self.pool.is_shared(table, index)
        assert table.ids() == (*before[:index], target, *before[index + 1 :])
        self.take_copies()
        self.content[target] = self.content[source]
        return self.note(Hold((source,), Holder.COPY))

    def note(self, hold: Hold) -> Hold:
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
        return self.note(hold)

    @rule(target=holds, owner=owners)
    def hand_over(self, owner: Owner) -> Hold:
        """A prefill ends, and only its lease is left."""
        hold = self.note(Hold(owner.table.ids(), Holder.LEASE))
        self.pool.retain(hold.blocks, Holder.LEASE)
        self.let_go(owner)
        return hold

    @rule(target=holds, owner=owners, stop=st.integers(1, 6))
    def retain_for_lease(self, owner: Owner, stop: int) -> Hold:
        """Somebody else reads a prefix, whoever holds it here, if anybody."""
        hashes, free = owner.hashes[:stop], set(self.pool._free)
        blocks = self.pool.cached(hashes)
        assert [self.content[b] for b in blocks] == hashes[: len(blocks)], "a block of another name is lent"
        assert len(blocks) == next((i for i, h in enumerate(hashes) if h not in self.pool._index.all()), len(hashes))
        if not blocks:
            return multiple()  # type: ignore[return-value]
        self.pool.retain_for_lease(blocks)
        assert set(self.pool._free) == free - set(blocks)
        return self.note(Hold(blocks, Holder.LEASE))

    @rule(
        owner=owners,
        stop=st.integers(1, 6),
        tenant=st.sampled_from(["a", "b"]),
        seconds=st.integers(1, 4),
        max_blocks=st.sampled_from([0, 0, 1, 2, 5]),
    )
    def keep_cached(self, owner: Owner, stop: int, tenant: str, seconds: int, max_blocks: int) -> None:
        free = set(self.pool._free)
        self.pool.keep_cached(TenantId(tenant), owner.hashes[:stop], self.now + seconds, max_blocks)
        assert set(self.pool._free) == free

    @rule()
    def pass_time(self) -> None:
        self.now += 1.0
        self.pool.end_retentions(self.now)

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
        copied += [block for spills, _ in self.plans for block, _ in spills]
        slots = [slot for spills, _ in self.plans for _, slot in spills]
        slots += [slot for _, fills in self.plans for slot, _ in fills]
        self.pool.check([o.table for o in self.live], leased, read, copied, slots)
        busy = {b for o in self.live for b in o.table.ids()} | set(leased) | set(read) | set(copied)
        assert self.pool.num_free == self.pool.num_blocks - len(busy)
        hashed = [b for b in self.pool._free if b in self.content and self.pool._index.is_cached(b)]
        kept = [self.pool._is_retained(block) for block in hashed]
        assert kept == sorted(kept), "a retained block is reused before another one"
        assert self.pool.num_leased == len(set(leased)) and self.pool.num_reading == len(set(read))
        assert all(self.pool.is_copied([block]) == (block in copied) for block in range(self.pool.num_blocks))

    @invariant()
    def facts_replay_to_what_is_present(self) -> None:
        if not hasattr(self, "pool"):
            return
        for fact in self.pool.take_events():
            match fact:
                case BlockStored(name, parent):
                    assert name not in self.present or name in self.in_host, "stored twice"
                    assert parent is None or parent in self.present, "stored before its parent"
                    self.present[name] = parent
                    self.in_host.discard(name)
                case BlockOffloaded(name):
                    assert name in self.present and name not in self.in_host, "demoted twice"
                    self.in_host.add(name)
                case BlockEvicted(name):
                    del self.present[name]
                    self.in_host.discard(name)
                    assert name not in self.present.values(), "a parent went before its child"
        assert set(self.present) == set(self.pool._index.all()) | self.in_host
        assert self.in_host == set(self.pool.host._sole) and self.in_host.isdisjoint(self.pool._index.all())
        for name in self.present:
            assert all(self.content[b] == name for b in self.pool._index.copies(name)), "a name stands on other content"
            if name in self.in_host:
                assert self.host_content[self.pool.host._slots[name]] == name, "a name stands on other content"


TestPool = PoolMachine.TestCase
TestPool.settings = effort(100, 70)
