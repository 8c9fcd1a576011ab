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

from tandem.core.events import BlockEvicted, BlockStored, KVFact
from tandem.core.ids import BlockHash, BlockId
from tandem.kv.free_list import Block, FreeList


class Holder(Enum):
    """Who else than a table may hold blocks; the value is the counter's name."""

    LEASE = "leases"
    READ = "reads"


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
    """A fixed number of blocks. Every method either does all it says or changes nothing."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens, got {num_blocks} x {block_size}")
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._blocks = [Block(BlockId(i)) for i in range(num_blocks)]
        self._free = FreeList()
        for block in self._blocks:
            self._free.push_back(block)
        self._copies: dict[BlockHash, list[BlockId]] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._facts: list[KVFact] = []
        self._num_leased = 0
        self._num_reading = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        """Blocks under at least one lease."""
        return self._num_leased

    @property
    def num_reading(self) -> int:
        """Blocks under at least one read."""
        return self._num_reading

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix hit can bring back."""
        return sum(1 for block in self._free if block.hash is not None)

    def count_hits(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are present."""
        for i, name in enumerate(hashes):
            if name not in self._copies:
                return i
        return len(hashes)

    def num_free_needed(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """How many free blocks a new table of `num_blocks` would take, its leading hits on `hashes` included."""
        num_hits = self.count_hits(hashes)
        held = sum(1 for name in hashes[:num_hits] if self._pick(name).refs > 0)
        return num_blocks - held

    def share(self, table: BlockTable, hashes: Sequence[BlockHash]) -> int:
        """Fill an empty table with the leading hits; returns how many there were."""
        if len(table):
            raise ValueError("only an empty table can share a prefix")
        num_hits = self.count_hits(hashes)
        for name in hashes[:num_hits]:
            block = self._pick(name)
            self._hold(block, "tables")
            table._blocks.append(block.id)
        table._num_published = num_hits
        return num_hits

    def grow(self, table: BlockTable, num_blocks: int) -> bool:
        """Extend a table to `num_blocks`. False, and nothing changed, when there is no room."""
        missing = num_blocks - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop_front()
            self._forget(block)
            block.tables = 1
            table._blocks.append(block.id)
        return True

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Make the leading blocks findable under `hashes`; call it only when their content is complete and checked."""
        if not self._caching:
            return
        for i in range(table.num_published, len(hashes)):
            block, name = self._blocks[table._blocks[i]], hashes[i]
            assert block.hash is None, f"{block!r} is published already"
            block.hash = name
            copies = self._copies.setdefault(name, [])
            copies.append(block.id)
            if len(copies) == 1:
                self._parents[name] = hashes[i - 1] if i else None
                self._facts.append(BlockStored(name, self._parents[name]))
            table._num_published = i + 1

    def release(self, table: BlockTable) -> None:
        """Give all blocks of a table back, last block first, and leave the table empty."""
        for block_id in reversed(table._blocks):
            self._let_go(self._blocks[block_id], "tables")
        table._blocks.clear()
        table._num_published = 0

    def retain(self, blocks: Iterable[BlockId], holder: Holder) -> None:
        """Hold blocks that somebody holds already, in the order of their tokens."""
        for block_id in blocks:
            block = self._blocks[block_id]
            assert block.refs > 0, f"{block!r} is free"
            self._hold(block, holder.value)

    def drop(self, blocks: Sequence[BlockId], holder: Holder) -> None:
        """End a `retain` of exactly these blocks."""
        for block_id in reversed(blocks):
            self._let_go(self._blocks[block_id], holder.value)

    def take_facts(self) -> list[KVFact]:
        """What became findable or was lost since the last call, in order."""
        facts, self._facts = self._facts, []
        return facts

    def check(self, tables: Iterable[BlockTable], leased: Iterable[BlockId], read: Iterable[BlockId]) -> None:
        """Re-add the books from all holders, given by their owners. Raises AssertionError naming what is off."""
        counts = {
            "tables": Counter(b for table in tables for b in table._blocks),
            "leases": Counter(leased),
            "reads": Counter(read),
        }
        for block in self._blocks:
            for holder, counter in counts.items():
                assert getattr(block, holder) == counter[block.id], f"{block!r}: {holder} should be {counter[block.id]}"
            linked = block.prev is not None
            assert linked == (block.refs == 0), f"{block!r}: free list and holders disagree"
            if block.hash is not None:
                assert block.id in self._copies[block.hash], f"{block!r} is not a copy of its hash"
        assert len(self._free) == sum(1 for b in self._blocks if b.refs == 0)
        assert self._num_leased == sum(1 for b in self._blocks if b.leases)
        assert self._num_reading == sum(1 for b in self._blocks if b.reads)
        assert self._copies.keys() == self._parents.keys()
        for name, copies in self._copies.items():
            assert copies and all(self._blocks[b].hash == name for b in copies), f"copies of {name.hex()} are off"
            parent = self._parents[name]
            assert parent is None or parent in self._copies, f"{name.hex()} is present without its parent"

    def __repr__(self) -> str:
        return (
            f"<pool {self.num_blocks} blocks: {self.num_free} free, {self._num_leased} leased, "
            f"{self._num_reading} reading, {len(self._copies)} hashes>"
        )

    def _pick(self, name: BlockHash) -> Block:
        """The copy that a hit uses: the newest, whose parents were released latest."""
        return self._blocks[self._copies[name][-1]]

    def _hold(self, block: Block, counter: str) -> None:
        if block.refs == 0:
            self._free.remove(block)
        count = getattr(block, counter) + 1
        setattr(block, counter, count)
        if count == 1:
            self._num_leased += counter == "leases"
            self._num_reading += counter == "reads"

    def _let_go(self, block: Block, counter: str) -> None:
        count = getattr(block, counter) - 1
        assert count >= 0, f"{block!r} has no {counter} to let go"
        setattr(block, counter, count)
        if count == 0:
            self._num_leased -= counter == "leases"
            self._num_reading -= counter == "reads"
        if block.refs == 0:
            if block.hash is None:
                self._free.push_front(block)
            else:
                self._free.push_back(block)

    def _forget(self, block: Block) -> None:
        """Drop the hash of a block that is about to be reused."""
        name = block.hash
        if name is None:
            return
        block.hash = None
        copies = self._copies[name]
        copies.remove(block.id)
        if not copies:
            del self._copies[name], self._parents[name]
            self._facts.append(BlockEvicted(name))
