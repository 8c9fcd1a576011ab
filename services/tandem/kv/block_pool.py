"""Owns which block is held by whom and which prefix it holds; never touches KV bytes and never reads a clock.

Holders of a block are tables (of sequences, and of prefixes that they borrow), leases (it is offered to another worker)
and reads (another worker's bytes are arriving in it). A block with no holder is free; a free block with a hash is the
prefix cache.

Presence implies parents: whoever holds a block holds a copy of every block before it, and a release frees the last
block first, so among free blocks a child is always reused before the copy of its parent that was released with it.
A block whose last copy is about to be reused may go on in host memory (`kv.host_pool`). So of a prefix the first
blocks are here and the rest there, and a table that shares it takes fresh blocks for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache

from tandem.core.events import BlockEvicted, BlockStored, KVFact
from tandem.core.ids import BlockHash, BlockId, HostSlot
from tandem.kv.cached_block_index import CachedBlockIndex
from tandem.kv.free_list import FreeList
from tandem.kv.host_offload import HostBlockPool, Offload, Onload


class Holder(Enum):
    """Who else than a table may hold blocks. COPY: a plan that was not committed yet copies them."""

    LEASE = "lease"
    READ = "read"
    COPY = "copy"


class BlockTable:
    """A sequence's blocks in the order of its tokens; append-only until released. Only `BlockPool` writes it."""

    __slots__ = ("_blocks", "_num_published")

    def __init__(self) -> None:
        self._blocks: list[BlockId] = []
        self._num_published = 0

    @property
    def num_published(self) -> int:
        """Leading blocks whose hashes are findable."""
        return self._num_published

    def ids(self, stop: int | None = None) -> tuple[BlockId, ...]:
        return tuple(self._blocks[:stop])

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<table {len(self._blocks)} blocks, {self._num_published} published>"


class BlockPool:
    """A fixed number of blocks. Every method either does all it says or changes nothing.

    A block costs memory from its first use on. `records_facts`: `take_events` is called now and then. With host slots
    `share`, `grow` and `make_exclusive` may ask for copies, which the next plan must take (`take_copies`) and make
    before anything is computed or read into its blocks; a table with blocks that a plan fills is kept until that plan's
    `end_copies`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        records_facts: bool = False,
        num_host_slots: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens, got {num_blocks} x {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.is_caching = enable_prefix_caching
        self.host = HostBlockPool(num_host_slots)
        self._free = FreeList(_ids(num_blocks))
        # How many of each kind hold a block; those that none holds are in no dictionary.
        self._tables: dict[BlockId, int] = {}
        self._leases: dict[BlockId, int] = {}
        self._reads: dict[BlockId, int] = {}
        self._copies: dict[BlockId, int] = {}
        self._names = CachedBlockIndex()
        self._facts: list[KVFact] | None = [] if records_facts else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        """Blocks under at least one lease."""
        return len(self._leases)

    @property
    def num_reading(self) -> int:
        """Blocks under at least one read."""
        return len(self._reads)

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix hit can bring back."""
        return self._free.num_hashed

    @property
    def num_free_at_once(self) -> int:
        """Free blocks that are taken without a copy to host memory."""
        return self.num_free - self.num_cached if self.host.num_slots else self.num_free

    def free_blocks(self) -> tuple[BlockId, ...]:
        """In the order in which they are reused."""
        return tuple(self._free)

    def copies(self, name: BlockHash) -> tuple[BlockId, ...]:
        """The blocks that hold it, in the order of their publishing."""
        return self._names.copies(name)

    def names(self) -> Iterable[BlockHash]:
        """All that device memory holds."""
        return self._names.all()

    def holders(self, block: BlockId) -> tuple[int, int, int, int]:
        """How many tables, leases, reads and copies hold it."""
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        return tables.get(block, 0), leases.get(block, 0), reads.get(block, 0), copies.get(block, 0)

    def is_shared(self, table: BlockTable, index: int) -> bool:
        """Another table holds the block too, so that none may write it."""
        return self._tables[table._blocks[index]] > 1

    def count_hits(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are present, in either memory."""
        for i, name in enumerate(hashes):
            if name not in self._names and name not in self.host:
                return i
        return len(hashes)

    def cached(self, hashes: Iterable[BlockHash]) -> tuple[BlockId, ...]:
        """The newest copies of the leading hashes that device memory holds."""
        return self._names.leading(hashes)

    def num_free_needed(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """How many free blocks a new table of `num_blocks` would take, its leading hits on `hashes` included."""
        num_hits = self.count_hits(hashes)
        hits = (self._names.newest(name) for name in hashes[:num_hits])
        return num_blocks - sum(1 for block in hits if block is not None and not self._is_free(block))

    def share(self, table: BlockTable, hashes: Sequence[BlockHash]) -> int:
        """Fill an empty table with the leading hits, the newest copy of each, whose parents were released latest;
        returns how many there were. There must be room, see `num_free_needed`."""
        if len(table):
            raise ValueError("only an empty table can share a prefix")
        num_hits = self.count_hits(hashes)
        for i, name in enumerate(hashes[:num_hits]):
            block = self._names.newest(name)
            if block is None:
                self._onload(table, hashes[:num_hits], i)
                break
            if self._is_free(block):
                self._free.remove(block)
            self._tables[block] = self._tables.get(block, 0) + 1
            table._blocks.append(block)
        table._num_published = num_hits
        return num_hits

    def grow(self, table: BlockTable, num_blocks: int) -> bool:
        """Extend a table to `num_blocks`. False, and nothing changed, when there is no room."""
        missing = num_blocks - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        table._blocks += self._take(missing)
        return True

    def fork(self, table: BlockTable, source: BlockTable) -> None:
        """Fill an empty table with all blocks of another."""
        if len(table):
            raise ValueError("only an empty table can be a fork")
        for block in source._blocks:
            self._tables[block] += 1
        table._blocks += source._blocks
        table._num_published = source._num_published

    def make_exclusive(self, table: BlockTable, index: int) -> tuple[BlockId, BlockId] | None:
        """Put a fresh block in the place of a shared one, whose content is to be copied: (from, to), and `from` is
        held as COPY. None, and nothing changed, when there is no room."""
        assert self.is_shared(table, index) and index >= table.num_published, f"{table!r} owns block {index} already"
        if not len(self._free):
            return None
        shared = table._blocks[index]
        fresh = self._take(1)[0]
        self._tables[shared] -= 1
        self._copies[shared] = self._copies.get(shared, 0) + 1
        table._blocks[index] = fresh
        return shared, fresh

    def trim(self, table: BlockTable, num_blocks: int) -> None:
        """Give back what a table has beyond its first blocks."""
        assert num_blocks >= table.num_published, f"{table!r} cannot lose what is published"
        self._let_go(table._blocks[num_blocks:], self._tables)
        del table._blocks[num_blocks:]

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Make the leading blocks findable under `hashes`; call it only when their content is complete and checked."""
        if not self.is_caching:
            return
        for i in range(table.num_published, len(hashes)):
            self._give_name(table._blocks[i], hashes[i], hashes[i - 1] if i else None)
            table._num_published = i + 1

    def release(self, table: BlockTable) -> None:
        """Give all blocks of a table back, last block first, and leave the table empty."""
        self._let_go(table._blocks, self._tables)
        table._blocks.clear()
        table._num_published = 0

    def retain(self, blocks: Sequence[BlockId], holder: Holder) -> None:
        """Hold blocks that somebody holds already, in the order of their tokens."""
        counts, once = self._counts(holder), dict.fromkeys(blocks, 1)
        if len(once) == len(blocks) and self._tables.keys() >= once.keys() and counts.keys().isdisjoint(once):
            counts.update(once)
            return
        for block in blocks:
            assert not self._is_free(block), f"block {block} is free"
            counts[block] = counts.get(block, 0) + 1

    def retain_for_lease(self, blocks: Iterable[BlockId]) -> None:
        """Hold blocks of a prefix as LEASE, which may be free, in the order of their tokens."""
        for block in blocks:
            if self._is_free(block):
                self._free.remove(block)
            self._leases[block] = self._leases.get(block, 0) + 1

    def is_copied(self, blocks: Iterable[BlockId]) -> bool:
        """One of them is still to be copied from: nobody may write it."""
        return not self._copies.keys().isdisjoint(blocks)

    def drop(self, blocks: Sequence[BlockId], holder: Holder) -> None:
        """End a `retain` of exactly these blocks."""
        self._let_go(blocks, self._counts(holder))

    def take_copies(self) -> tuple[tuple[Offload, ...], tuple[Onload, ...]]:
        """What the next plan copies to host memory, and then back from it. Blocks that it copies out are held as COPY
        until `end_copies`."""
        return self.host.take_copies()

    def end_copies(self, spills: Sequence[Offload], fills: Sequence[Onload]) -> None:
        """The plan that took them was committed."""
        self.drop([block for block, _ in spills], Holder.COPY)
        self.host.end_copies(spills, fills)

    def take_events(self) -> list[KVFact]:
        """What became findable or was lost since the last call, in order; nothing unless facts are recorded."""
        if self._facts is None:
            return []
        facts, self._facts = self._facts, []
        return facts

    def check(
        self,
        tables: Iterable[BlockTable],
        leased: Iterable[BlockId],
        read: Iterable[BlockId],
        copied: Iterable[BlockId] = (),
        pinned: Iterable[HostSlot] = (),
    ) -> None:
        """Re-add the books from all holders, given by their owners; `pinned` has every host slot once for each copy of
        an open plan. Raises AssertionError naming what is off."""
        claimed = {"tables": Counter(b for table in tables for b in table._blocks)}
        claimed |= {"leases": Counter(leased), "reads": Counter(read)}
        claimed["copies"] = Counter([*copied, *self.host.blocks_to_spill()])
        books = {"tables": self._tables, "leases": self._leases, "reads": self._reads, "copies": self._copies}
        for kind, counted in books.items():
            for block in counted.keys() | claimed[kind].keys():
                now, due = counted.get(block, 0), claimed[kind][block]
                assert now == due, f"block {block}: {kind} are {now}, should be {due}"
        free = list(self._free)
        held = set().union(*books.values())
        assert len(free) == len(self._free) == len(set(free)), "a block is free twice"
        assert held.isdisjoint(free) and len(free) + len(held) == self.num_blocks, "free list and holders disagree"
        self._names.check()
        self.host.check(self._names.all(), pinned)
        assert self._tables.keys() >= set(self.host.blocks_to_fill()), "a block to be filled is in no table"

    def __repr__(self) -> str:
        return (
            f"<pool {self.num_blocks} blocks: {self.num_free} free, {self.num_leased} leased, "
            f"{self.num_reading} reading, {len(self._names)} hashes>"
        )

    def _counts(self, holder: Holder) -> dict[BlockId, int]:
        return {Holder.LEASE: self._leases, Holder.READ: self._reads, Holder.COPY: self._copies}[holder]

    def _is_free(self, block: BlockId) -> bool:
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        return block not in tables and block not in leases and block not in reads and block not in copies

    def _take(self, count: int) -> list[BlockId]:
        """The free blocks that are reused first, each in one table from now on and without its name; there are as
        many."""
        taken = self._free.take(count)
        self._tables.update(dict.fromkeys(taken, 1))
        self._names.extend(self._free.num_used)
        for block in taken:
            if self._names.is_named(block):
                self._forget(block)
        return taken

    def _let_go(self, blocks: Sequence[BlockId], counts: dict[BlockId, int]) -> None:
        """Last block first."""
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        for block in reversed(blocks):
            count = counts[block]
            if count > 1:
                counts[block] = count - 1
                continue
            del counts[block]
            if block not in tables and block not in leases and block not in reads and block not in copies:
                self._free.free(block, self._names.is_named(block))

    def _give_name(self, block: BlockId, name: BlockHash, parent: BlockHash | None) -> None:
        if self._names.add(block, name, parent):
            self.host.stored(name)
            if self._facts is not None:
                self._facts.append(BlockStored(name, parent))

    def _onload(self, table: BlockTable, hits: Sequence[BlockHash], first: int) -> None:
        """Extend a table, which has the hits before, by those from the `first`-th on; only host memory holds them."""
        slots = self.host.claim(hits[first:])
        blocks = self._take(len(slots))
        self.host.fill(slots, blocks)
        for i, block in enumerate(blocks, first):
            self._give_name(block, hits[i], hits[i - 1] if i else None)
        table._blocks += blocks

    def _forget(self, block: BlockId) -> None:
        """Drop the name of a block that is about to be written; where it is the last one, host memory may keep it."""
        last = self._names.evict(block)
        if last is None:
            return
        name, parent = last
        if not self.host.num_slots:
            if self._facts is not None:
                self._facts.append(BlockEvicted(name))
            return
        kept = self.host.keep(name, parent, block)
        if kept.is_copied:
            self._copies[block] = self._copies.get(block, 0) + 1
        self._let_go(kept.dropped, self._copies)
        if self._facts is not None:
            self._facts += kept.facts


@lru_cache(maxsize=8)
def _ids(num_blocks: int) -> tuple[BlockId, ...]:
    """Shared by pools of one size: a number is 32 bytes."""
    return tuple(BlockId(i) for i in range(num_blocks))
