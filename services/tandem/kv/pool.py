"""Owns which block is held by whom and which prefix it holds; never touches KV bytes and never reads a clock.

Holders of a block are tables (sequences), leases (it is offered to another worker) and reads (another worker's bytes
are arriving in it). A block with no holder is free; a free block with a hash is the prefix cache.

Presence implies parents: whoever holds a block holds a copy of every block before it, and a release frees the last
block first, so among free blocks a child is always reused before the copy of its parent that was released with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache

from tandem.core.events import BlockEvicted, BlockStored, KVFact
from tandem.core.ids import BlockHash, BlockId
from tandem.kv.free_list import FreeList


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

    A block costs memory from its first use on. `records_facts`: `take_facts` is called now and then.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, records_facts: bool = False
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens, got {num_blocks} x {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.is_caching = enable_prefix_caching
        self._free = FreeList(_ids(num_blocks))
        # How many of each kind hold a block; those that none holds are in no dictionary.
        self._tables: dict[BlockId, int] = {}
        self._leases: dict[BlockId, int] = {}
        self._reads: dict[BlockId, int] = {}
        self._copies: dict[BlockId, int] = {}
        # By block, of those used at least once: its name from the moment its content is computed until it is reused,
        # and the name of the block before it.
        self._names: list[BlockHash | None] = []
        self._parents: list[BlockHash | None] = []
        # The copy of a name that was published last, and the others, oldest first.
        self._newest: dict[BlockHash, BlockId] = {}
        self._older: dict[BlockHash, list[BlockId]] = {}
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

    def free_blocks(self) -> tuple[BlockId, ...]:
        """In the order in which they are reused."""
        return tuple(self._free)

    def copies(self, name: BlockHash) -> tuple[BlockId, ...]:
        """The blocks that hold it, in the order of their publishing."""
        return (*self._older.get(name, ()), self._newest[name]) if name in self._newest else ()

    def names(self) -> Iterable[BlockHash]:
        """All that is findable."""
        return self._newest.keys()

    def holders(self, block: BlockId) -> tuple[int, int, int, int]:
        """How many tables, leases, reads and copies hold it."""
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        return tables.get(block, 0), leases.get(block, 0), reads.get(block, 0), copies.get(block, 0)

    def is_shared(self, table: BlockTable, index: int) -> bool:
        """Another table holds the block too, so that none may write it."""
        return self._tables[table._blocks[index]] > 1

    def count_hits(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are present."""
        for i, name in enumerate(hashes):
            if name not in self._newest:
                return i
        return len(hashes)

    def num_free_needed(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """How many free blocks a new table of `num_blocks` would take, its leading hits on `hashes` included."""
        num_hits = self.count_hits(hashes)
        return num_blocks - sum(1 for name in hashes[:num_hits] if not self._is_free(self._newest[name]))

    def share(self, table: BlockTable, hashes: Sequence[BlockHash]) -> int:
        """Fill an empty table with the leading hits, the newest copy of each, whose parents were released latest;
        returns how many there were."""
        if len(table):
            raise ValueError("only an empty table can share a prefix")
        num_hits = self.count_hits(hashes)
        for name in hashes[:num_hits]:
            block = self._newest[name]
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
        taken = self._take(missing)
        self._tables.update(dict.fromkeys(taken, 1))
        table._blocks += taken
        return True

    def fork(self, table: BlockTable, source: BlockTable) -> None:
        """Fill an empty table with all blocks of another."""
        if len(table):
            raise ValueError("only an empty table can be a fork")
        for block in source._blocks:
            self._tables[block] += 1
        table._blocks += source._blocks
        table._num_published = source._num_published

    def own(self, table: BlockTable, index: int) -> tuple[BlockId, BlockId] | None:
        """Put a fresh block in the place of a shared one, whose content is to be copied: (from, to), and `from` is
        held as COPY. None, and nothing changed, when there is no room."""
        assert self.is_shared(table, index) and index >= table.num_published, f"{table!r} owns block {index} already"
        if not len(self._free):
            return None
        shared = table._blocks[index]
        fresh = self._take(1)[0]
        self._tables[shared] -= 1
        self._tables[fresh] = 1
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
            block, name = table._blocks[i], hashes[i]
            assert self._names[block] is None, f"block {block} is published already"
            self._names[block] = name
            self._parents[block] = hashes[i - 1] if i else None
            older = self._newest.get(name)
            self._newest[name] = block
            if older is not None:
                self._older.setdefault(name, []).append(older)
            elif self._facts is not None:
                self._facts.append(BlockStored(name, self._parents[block]))
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

    def drop(self, blocks: Sequence[BlockId], holder: Holder) -> None:
        """End a `retain` of exactly these blocks."""
        self._let_go(blocks, self._counts(holder))

    def take_facts(self) -> list[KVFact]:
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
    ) -> None:
        """Re-add the books from all holders, given by their owners. Raises AssertionError naming what is off."""
        claimed = {"tables": Counter(b for table in tables for b in table._blocks)}
        claimed |= {"leases": Counter(leased), "reads": Counter(read), "copies": Counter(copied)}
        books = {"tables": self._tables, "leases": self._leases, "reads": self._reads, "copies": self._copies}
        for kind, counted in books.items():
            for block in counted.keys() | claimed[kind].keys():
                now, due = counted.get(block, 0), claimed[kind][block]
                assert now == due, f"block {block}: {kind} are {now}, should be {due}"
        free = list(self._free)
        held = set().union(*books.values())
        assert len(free) == len(self._free) == len(set(free)), "a block is free twice"
        assert held.isdisjoint(free) and len(free) + len(held) == self.num_blocks, "free list and holders disagree"
        self._check_names()

    def __repr__(self) -> str:
        return (
            f"<pool {self.num_blocks} blocks: {self.num_free} free, {self.num_leased} leased, "
            f"{self.num_reading} reading, {len(self._newest)} hashes>"
        )

    def _check_names(self) -> None:
        named = {BlockId(i): name for i, name in enumerate(self._names) if name is not None}
        for name in self._newest:
            for block in self.copies(name):
                assert named.pop(block, None) == name, f"block {block} is no copy of {name.hex()}"
                parent = self._parents[block]
                assert parent is None or parent in self._newest, f"{name.hex()} is present without its parent"
        assert not named, f"blocks {list(named)} have names that cannot be found"
        assert all(self._older.values()) and self._older.keys() <= self._newest.keys(), "copies of nothing"

    def _counts(self, holder: Holder) -> dict[BlockId, int]:
        if holder is Holder.LEASE:
            return self._leases
        return self._reads if holder is Holder.READ else self._copies

    def _is_free(self, block: BlockId) -> bool:
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        return block not in tables and block not in leases and block not in reads and block not in copies

    def _take(self, count: int) -> list[BlockId]:
        """The free blocks that are reused first, without their names; there are as many."""
        taken = self._free.take(count)
        unused = self._free.num_used - len(self._names)
        self._names += [None] * unused
        self._parents += [None] * unused
        for block in taken:
            if self._names[block] is not None:
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
                self._free.free(block, self._names[block] is not None)

    def _forget(self, block: BlockId) -> None:
        """Drop the name of a block that is about to be reused."""
        name = self._names[block]
        assert name is not None
        self._names[block] = self._parents[block] = None
        older = self._older.get(name)
        if older is None:
            del self._newest[name]
            if self._facts is not None:
                self._facts.append(BlockEvicted(name))
            return
        if self._newest[name] == block:
            self._newest[name] = older.pop()
        else:
            older.remove(block)
        if not older:
            del self._older[name]


@lru_cache(maxsize=8)
def _ids(num_blocks: int) -> tuple[BlockId, ...]:
    """Shared by pools of one size: a number is 32 bytes."""
    return tuple(BlockId(i) for i in range(num_blocks))
