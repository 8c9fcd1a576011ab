"""Record which sequence, lease or read holds each device block, and under which prefix hash the content of a block is
cached.

The pool handles block ids only: KV bytes and clocks stay outside. Holders of a block are tables (of sequences, and of
remote prefixes that sequences fetch), leases (the block is offered to another worker), reads (bytes from another worker
are arriving in the block) and copies (a step copies the block's content elsewhere). A block without a holder is free;
the free blocks with a hash are the prefix cache.

If a block is cached, all blocks before it in its prefix (its parents) are cached too. Whoever holds a block also holds
a copy of every block before it, and a release frees the last block first. So among free blocks, a child is always
reused before those copies of its parents that were released with it. A block whose last device copy is about to be
reused may be offloaded to host memory (`kv.host_offload`). The first blocks of a prefix are therefore in device memory
and the rest in host memory, and a table that shares the prefix takes fresh blocks for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored, KVFact
from tandem.core.ids import BlockHash, BlockId, HostSlot, TenantId
from tandem.kv.cached_block_index import CachedBlockIndex
from tandem.kv.free_list import FreeList
from tandem.kv.host_offload import HostBlockPool, Offload, OffloadDecision, Onload
from tandem.kv.retained_prefixes import RetainedPrefixes

MAX_COPIED_AHEAD = 4
"""Most blocks that one step copies to host memory only to have them written to files."""


class Holder(Enum):
    """Name the kinds of holders that a block can have besides block tables. A block with a holder is not reused.

    LEASE: the block is offered to another worker. READ: bytes from another worker are arriving in the block. COPY: the
    block's content is to be copied to another block or to host memory, and the engine has not committed the step that
    makes this copy.
    """

    LEASE = "lease"
    READ = "read"
    COPY = "copy"


class BlockTable:
    """Hold the ids of the blocks of one sequence, in the order of its tokens. Only `BlockPool` changes a table: it
    appends blocks, and removes them from the end with `trim` or all at once with `release`."""

    __slots__ = ("_blocks", "num_published")

    def __init__(self) -> None:
        self._blocks: list[BlockId] = []
        self.num_published = 0
        """Number of leading blocks whose hashes a prefix lookup can find."""

    def ids(self, stop: int | None = None) -> tuple[BlockId, ...]:
        return tuple(self._blocks[:stop])

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<table {len(self._blocks)} blocks, {self.num_published} published>"


class BlockPool:
    """Give blocks of device memory to sequences, leases and reads, find cached blocks by hash, and free blocks that
    have no holder left. A method that fails changes nothing.

    - `num_blocks`: blocks of the pool. `block_size`: tokens of a block.
    - `enable_prefix_caching`: let tables share blocks by hash. If it is False, `publish` does nothing, so no block is
      cached.
    - `records_facts`: collect KV events (blocks cached, offloaded, evicted) in a list, which the owner must empty
      regularly by `take_events`.
    - `num_host_slots`: number of blocks for which host memory is reserved; 0 turns offloading off. `keeps_files`:
      blocks in host memory are also written to files (`engine.file_tier`).
    - `max_retained_blocks`: largest number of blocks that `keep_cached` protects from reuse.

    Raises ValueError for a pool without blocks or a block without tokens.

    With host slots, `share`, `grow` and `make_exclusive` may queue copies between device and host memory. The plan of
    the next step must take them by `HostBlockPool.take_copies`. That step must make them before it computes anything,
    and before a read from another worker writes to the blocks that they concern. A table that has a block into which a
    step copies must not be released before `end_copies` was called for this step. The pool's own record of a block
    takes memory only from the block's first use on.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        records_facts: bool = False,
        num_host_slots: int = 0,
        max_retained_blocks: int = 0,
        keeps_files: bool = False,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens, got {num_blocks} x {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.is_caching = enable_prefix_caching
        self.host = HostBlockPool(num_host_slots, keeps_files=keeps_files)
        self._retained = RetainedPrefixes(max_retained_blocks)
        self._free = FreeList(_ids(num_blocks))
        # Number of holders of each kind, by block; a block without holders is in no dictionary.
        self._tables: dict[BlockId, int] = {}
        self._leases: dict[BlockId, int] = {}
        self._reads: dict[BlockId, int] = {}
        self._copies: dict[BlockId, int] = {}
        self._index = CachedBlockIndex()
        self._facts: list[KVFact] | None = [] if records_facts else None
        # Blocks that stood before offloaded ones when these left device memory, and that files may not have.
        self._unfiled: dict[BlockHash, None] = {}
        # Blocks that an open plan copies ahead.
        self._copied_ahead: set[BlockId] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        """Count the blocks that are offered to another worker under at least one lease."""
        return len(self._leases)

    @property
    def num_reading(self) -> int:
        """Count the blocks into which at least one open read from another worker writes."""
        return len(self._reads)

    @property
    def num_cached(self) -> int:
        """Count the free blocks whose content is cached, so that a prefix hit can reuse them."""
        return self._free.num_hashed

    @property
    def num_free_at_once(self) -> int:
        """Count the free blocks that can be taken without copying a cached block to host memory first."""
        return self.num_free - self.num_cached if self.host.num_slots else self.num_free

    def holders(self, block: BlockId) -> tuple[int, int, int, int]:
        """Return how many tables, leases, reads and pending copies hold `block`, in this order."""
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        return tables.get(block, 0), leases.get(block, 0), reads.get(block, 0), copies.get(block, 0)

    def is_shared(self, table: BlockTable, index: int) -> bool:
        """Return whether another table also holds the block at position `index` of `table`. A shared block must not be
        written."""
        return self._tables[table._blocks[index]] > 1

    def count_hits(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading `hashes` whose blocks are cached in device or host memory, up to the first that is in
        neither."""
        for i, block_hash in enumerate(hashes):
            if block_hash not in self._index and block_hash not in self.host:
                return i
        return len(hashes)

    def count_reachable(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading `hashes` whose blocks need not be computed: first those that are cached in device or host
        memory, then those directly after them whose blocks are in files."""
        for i in range(self.count_hits(hashes), len(hashes)):
            if hashes[i] not in self.host.in_files:
                return i
        return len(hashes)

    def note_files(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Update the record of which KV blocks are in files of the file cache (`engine.file_cache_path`).

        `added`: hashes of blocks for which there is a file now. `removed`: hashes of blocks without a usable file any
        more.
        """
        self.host.in_files.update(added)
        self.host.in_files.difference_update(removed)

    def reserve_slots(self, hashes: Sequence[BlockHash], first: int) -> list[HostSlot]:
        """Reserve host slots for the blocks `hashes[first:]`, which will be read from files; return one slot for each
        block, in the order of the blocks.

        `hashes`: block hashes of a prefix from its first block on. If host memory has no room for all, the result has
        slots for the first of these blocks only. The blocks `hashes[:first]` are not evicted to make room. `admit` ends
        the reservation of slots that were filled, `HostBlockPool.unpin` that of the others.
        """
        slots, decision = self.host.reserve(len(hashes) - first, hashes[:first])
        self._carry_out(decision)
        return slots

    def admit(self, hashes: Sequence[BlockHash], slots: Sequence[HostSlot]) -> None:
        """Cache the last `len(slots)` blocks of a prefix in host memory, after their content was read from files.

        `hashes`: block hashes of the prefix, from its first block to the last one that was read. `slots`: the reserved
        host slots that hold the content, in the order of the blocks. If one of these blocks was cached meanwhile, its
        slot is freed. If a block before them in the prefix is not cached any more, all `slots` are freed.
        """
        first = len(hashes) - len(slots)
        is_chained = self.count_hits(hashes[:first]) == first
        fresh: dict[BlockHash, HostSlot] = {}
        for block_hash, slot in zip(hashes[first:], slots, strict=True):
            if is_chained and block_hash not in self._index and block_hash not in self.host:
                fresh[block_hash] = slot
            else:
                self.host.unpin([slot])
        self.host.admit(fresh, hashes)
        if self._facts is not None:
            for i, block_hash in enumerate(hashes[first:], first):
                if block_hash in fresh:
                    self._facts += [BlockStored(block_hash, hashes[i - 1] if i else None), BlockOffloaded(block_hash)]

    def copy_ahead(self) -> None:
        """Queue copies of blocks from device to host memory, so that these blocks can be written to files although they
        stay in device memory.

        Such a block directly precedes, in its prefix, a block that was offloaded or copied by this method, and neither
        host memory nor a file has it. So files hold prefixes from their first block on. At most `MAX_COPIED_AHEAD`
        blocks are copied in a call. Call it directly before the next plan takes the queued copies: they are then made
        before a later plan overwrites the blocks. The blocks get no holder, so free ones keep their position in the
        free list.
        """
        num_copied = 0
        while self._unfiled and num_copied < MAX_COPIED_AHEAD:
            block_hash, _ = self._unfiled.popitem()
            block = self._index.newest(block_hash)
            if block is None or not self.host.needs_file(block_hash):
                continue
            decision = self.host.copy_ahead(block_hash, block)
            if decision is None:
                self._unfiled[block_hash] = None
                return
            self._carry_out(decision)
            self._copied_ahead.add(block)
            parent = self._index.parent_of(block)
            if parent is not None:
                self._unfiled[parent] = None
            num_copied += 1

    @property
    def has_copies(self) -> bool:
        """Return whether the next plan may have copies between device and host memory to make."""
        return self.host.has_copies or len(self._unfiled) > 0

    def cached(self, hashes: Iterable[BlockHash]) -> tuple[BlockId, ...]:
        """Return the device blocks that hold the leading `hashes`, up to the first hash that device memory lacks. Of
        several blocks with the same hash, the one cached last is returned."""
        return self._index.leading(hashes)

    def num_free_needed(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """Return how many blocks must be free to fill a new table of `num_blocks` blocks that begins with the cached
        blocks of the leading `hashes`.

        The table shares the blocks that are cached in device memory; each of them counts only if it is free now. All
        other blocks of the table count, because they are taken from the free ones.
        """
        num_hits = self.count_hits(hashes)
        hits = (self._index.newest(block_hash) for block_hash in hashes[:num_hits])
        return num_blocks - sum(1 for block in hits if block is not None and not self._is_free(block))

    def share(self, table: BlockTable, hashes: Sequence[BlockHash]) -> int:
        """Fill an empty table with the cached blocks of the leading `hashes`, and return the number of these blocks.

        A block that only host memory holds gets a fresh device block, and a copy into it is queued. If several device
        blocks have the same hash, the one cached last is taken, because the blocks before it were released last. The
        caller must make sure that enough blocks are free, see `num_free_needed`. Raises ValueError for a table that has
        blocks.
        """
        if len(table):
            raise ValueError("only an empty table can share a prefix")
        num_hits = self.count_hits(hashes)
        for i, block_hash in enumerate(hashes[:num_hits]):
            block = self._index.newest(block_hash)
            if block is None:
                self._onload(table, hashes[:num_hits], i)
                break
            if self._is_free(block):
                self._free.remove(block, is_retained=block_hash in self._retained)
            self._tables[block] = self._tables.get(block, 0) + 1
            table._blocks.append(block)
        table.num_published = num_hits
        return num_hits

    def grow(self, table: BlockTable, num_blocks: int) -> bool:
        """Extend a table to `num_blocks` blocks in all and return True; return False, with nothing changed, when too
        few blocks are free. A table that is long enough already is not changed."""
        missing = num_blocks - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        table._blocks += self._take(missing)
        return True

    def fork(self, table: BlockTable, source: BlockTable) -> None:
        """Fill an empty table with all blocks of the table `source`, so that both tables share them. Raises ValueError
        for a table that has blocks."""
        if len(table):
            raise ValueError("only an empty table can be a fork")
        for block in source._blocks:
            self._tables[block] += 1
        table._blocks += source._blocks
        table.num_published = source.num_published

    def make_exclusive(self, table: BlockTable, index: int) -> tuple[BlockId, BlockId] | None:
        """Replace the shared block at position `index` of a table by a fresh one, for copy-on-write; return (shared
        block, fresh block).

        The caller must have the content copied from the shared to the fresh block. Until then the shared block has a
        COPY holder, which the caller ends by `drop`. Returns None, with nothing changed, when no block is free. Raises
        AssertionError when no other table has the block, or its hash is published.
        """
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
        """Release the blocks of a table after its first `num_blocks`. Raises AssertionError when one of them has a
        published hash."""
        assert num_blocks >= table.num_published, f"{table!r} cannot lose what is published"
        self._let_go(table._blocks[num_blocks:], self._tables)
        del table._blocks[num_blocks:]

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Make the leading blocks of `table` findable under `hashes`, one hash per block from the first block on;
        blocks published earlier are skipped. The content of these blocks must be complete and checked. Does nothing
        without prefix caching."""
        if not self.is_caching:
            return
        for i in range(table.num_published, len(hashes)):
            self._add_hash(table._blocks[i], hashes[i], hashes[i - 1] if i else None)
            table.num_published = i + 1

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, last block first, and leave the table empty."""
        self._let_go(table._blocks, self._tables)
        table._blocks.clear()
        table.num_published = 0

    def retain(self, blocks: Sequence[BlockId], holder: Holder) -> None:
        """Add one more holder, of kind `holder`, to each of `blocks`, which already have a holder of any kind (a table
        included). Raises AssertionError for a free block.

        `blocks` are in the order of their tokens. `drop`, by which the caller later ends these holders, must get them
        in this order too: it frees the last block first, so that this block is reused before its parents.
        """
        counts, single = self._counts(holder), dict.fromkeys(blocks, 1)
        if len(single) == len(blocks) and self._tables.keys() >= single.keys() and counts.keys().isdisjoint(single):
            counts.update(single)
            return
        for block in blocks:
            assert not self._is_free(block), f"block {block} is free"
            counts[block] = counts.get(block, 0) + 1

    def retain_for_lease(self, blocks: Iterable[BlockId]) -> None:
        """Add a LEASE holder to each of `blocks`, which are cached and in the order of their tokens. Unlike in
        `retain`, a block may be free before; it is then removed from the free list."""
        for block in blocks:
            if self._is_free(block):
                self._free.remove(block, is_retained=self._is_retained(block))
            self._leases[block] = self._leases.get(block, 0) + 1

    def keep_cached(self, tenant: TenantId, hashes: Sequence[BlockHash], until: float, max_blocks: int = 0) -> None:
        """Retain cached device blocks of a prefix for a tenant: until the time `until`, they are reused only after all
        other free blocks. Retained blocks without a holder still count as free.

        - `hashes`: block hashes of the prefix from its first block on. The leading ones that are cached in device
          memory are retained, as many as the limits of the pool and the tenant allow.
        - `until`: in seconds of the caller's clock. A retention of an earlier call that ends later is not changed.
        - `max_blocks`: most blocks that the tenant may retain; 0: only the pool's limit applies.
        """
        num_cached = len(self.cached(hashes))
        fresh, lost = self._retained.retain(tenant, hashes[:num_cached], until, max_blocks)
        for block_hash in lost:
            self._move_free(block_hash, is_retained=False)
        for block_hash in reversed(fresh):
            self._move_free(block_hash, is_retained=True)

    def end_retentions(self, now: float) -> None:
        """End the retentions that last until `now` or earlier, in seconds of the caller's clock. Their free blocks are
        then reused in turn with the other cached blocks."""
        for block_hash in self._retained.expire(now):
            self._move_free(block_hash, is_retained=False)

    @property
    def num_retained(self) -> int:
        """Count the cached blocks that are reused after all others because of `keep_cached`. A block that several
        tenants retain counts once for each of them."""
        return len(self._retained)

    def is_copied(self, blocks: Iterable[BlockId]) -> bool:
        """Return whether any of `blocks` is the source of a copy that is not finished; such a block must not be
        written."""
        return not self._copies.keys().isdisjoint(blocks) or not self._copied_ahead.isdisjoint(blocks)

    def drop(self, blocks: Sequence[BlockId], holder: Holder) -> None:
        """Remove one holder of kind `holder` from each of `blocks`, the same blocks as in an earlier `retain`, and free
        those that have no holder left."""
        self._let_go(blocks, self._counts(holder))

    def end_copies(self, spills: Sequence[Offload], fills: Sequence[Onload]) -> None:
        """Release the blocks and host slots that the copies of a step held, once the engine has committed the step.

        - `spills`: the step's copies from device to host memory, as (block, slot). Each held its slot and, unless it
          was queued by `copy_ahead`, its block.
        - `fills`: the step's copies from host to device memory, as (slot, block). Each held its slot.
        """
        self.drop([block for block, _ in spills if block not in self._copied_ahead], Holder.COPY)
        self._copied_ahead.difference_update(block for block, _ in spills)
        self.host.end_copies(spills, fills)

    def take_events(self) -> list[KVFact]:
        """Return the KV events since the last call, oldest first, and forget them; empty unless the pool was made with
        `records_facts`."""
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
        """Recount all holders from what their owners report, and raise AssertionError naming the first difference.

        `tables`: all block tables in use. `leased`, `read`, `copied`: each block once for each lease, read or open copy
        that holds it. `pinned`: each host slot once for each copy that uses it in a step that is not committed yet, and
        for each open read or write of a file.
        """
        claimed = {"tables": Counter(b for table in tables for b in table._blocks)}
        claimed |= {"leases": Counter(leased), "reads": Counter(read)}
        claimed["copies"] = Counter([*copied, *self.host.blocks_to_spill()]) - Counter(self._copied_ahead)
        books = {"tables": self._tables, "leases": self._leases, "reads": self._reads, "copies": self._copies}
        for kind, counted in books.items():
            for block in counted.keys() | claimed[kind].keys():
                actual, expected = counted.get(block, 0), claimed[kind][block]
                assert actual == expected, f"block {block}: {kind} are {actual}, should be {expected}"
        free = list(self._free)
        held = set().union(*books.values())
        assert len(free) == len(self._free) == len(set(free)), "a block is free twice"
        assert held.isdisjoint(free) and len(free) + len(held) == self.num_blocks, "free list and holders disagree"
        self._index.check()
        self._retained.check()
        self.host.check(self._index.all(), pinned)
        assert self._tables.keys() >= set(self.host.blocks_to_fill()), "a block to be filled is in no table"

    def __repr__(self) -> str:
        return (
            f"<pool {self.num_blocks} blocks: {self.num_free} free, {self.num_leased} leased, "
            f"{self.num_reading} reading, {len(self._index)} hashes>"
        )

    def _counts(self, holder: Holder) -> dict[BlockId, int]:
        return {Holder.LEASE: self._leases, Holder.READ: self._reads, Holder.COPY: self._copies}[holder]

    def _is_free(self, block: BlockId) -> bool:
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        return block not in tables and block not in leases and block not in reads and block not in copies

    def _take(self, count: int) -> list[BlockId]:
        """Remove the `count` free blocks that are reused first, drop their hashes, and give each one table as its
        holder.

        The caller makes sure that `count` blocks are free.
        """
        taken = self._free.take(count)
        self._tables.update(dict.fromkeys(taken, 1))
        self._index.extend(self._free.num_used)
        for block in taken:
            if self._index.is_cached(block):
                self._forget(block)
        return taken

    def _let_go(self, blocks: Sequence[BlockId], counts: dict[BlockId, int]) -> None:
        """Remove one holder from each block, last block first, and free the blocks that have no holder left."""
        tables, leases, reads, copies = self._tables, self._leases, self._reads, self._copies
        for block in reversed(blocks):
            count = counts[block]
            if count > 1:
                counts[block] = count - 1
                continue
            del counts[block]
            if block not in tables and block not in leases and block not in reads and block not in copies:
                is_hashed = self._index.is_cached(block)
                self._free.free(block, is_hashed=is_hashed, is_retained=is_hashed and self._is_retained(block))

    def _is_retained(self, block: BlockId) -> bool:
        block_hash = self._index.hash_of(block)
        return block_hash is not None and block_hash in self._retained

    def _move_free(self, block_hash: BlockHash, *, is_retained: bool) -> None:
        for block in self._index.copies(block_hash):
            if self._is_free(block):
                self._free.move(block, is_retained=is_retained)

    def _add_hash(self, block: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> None:
        if self._index.add(block, block_hash, parent):
            self.host.stored(block_hash)
            if self._facts is not None:
                self._facts.append(BlockStored(block_hash, parent))

    def _onload(self, table: BlockTable, hits: Sequence[BlockHash], first: int) -> None:
        """Extend a table by the blocks of `hits[first:]`, which only host memory holds, and queue their copies."""
        slots = self.host.claim(hits[first:])
        blocks = self._take(len(slots))
        self.host.fill(slots, blocks)
        for i, block in enumerate(blocks, first):
            self._add_hash(block, hits[i], hits[i - 1] if i else None)
        table._blocks += blocks

    def _forget(self, block: BlockId) -> None:
        """Drop the hash of a block that is about to be overwritten. If no other device block has the hash, let host
        memory keep the content where there is room."""
        evicted = self._index.evict(block)
        if evicted is None:
            return
        block_hash, parent = evicted
        self._retained.forget(block_hash)
        self._unfiled.pop(block_hash, None)
        if not self.host.num_slots:
            if self._facts is not None:
                self._facts.append(BlockEvicted(block_hash))
            return
        decision = self.host.keep(block_hash, parent, block)
        if decision.is_copied:
            self._copies[block] = self._copies.get(block, 0) + 1
        self._carry_out(decision)
        if self.host.keeps_files and parent is not None and self.host.needs_file(parent):
            self._unfiled[parent] = None

    def _carry_out(self, decision: OffloadDecision) -> None:
        """Release the blocks whose queued copies to host memory were cancelled, and record the evictions."""
        self._let_go(decision.dropped, self._copies)
        if self._facts is not None:
            self._facts += decision.facts


@lru_cache(maxsize=8)
def _ids(num_blocks: int) -> tuple[BlockId, ...]:
    """Return the ids of a pool's blocks. Cached, because pools of one size share the tuple: an int object takes 32
    bytes."""
    return tuple(BlockId(i) for i in range(num_blocks))
