"""Record which device blocks hold the content of which prefix hash."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tandem.core.ids import BlockHash, BlockId


class CachedBlockIndex:
    """Find device blocks by prefix hash, and the hash of a device block.

    A block has a hash from the moment its content is computed, or its copy from host memory is queued, until the block
    is reused. Several blocks may have the same hash; they are kept in the order in which they were added.
    """

    __slots__ = ("_hashes", "_newest", "_older", "_parents")

    def __init__(self) -> None:
        # By block id, for blocks that were used at least once: the block's hash and the hash of the block before it.
        self._hashes: list[BlockHash | None] = []
        self._parents: list[BlockHash | None] = []
        # The copy of a hash that was added last, and the older copies, oldest first.
        self._newest: dict[BlockHash, BlockId] = {}
        self._older: dict[BlockHash, list[BlockId]] = {}

    def __len__(self) -> int:
        """Count the distinct hashes."""
        return len(self._newest)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._newest

    def all(self) -> Collection[BlockHash]:
        return self._newest.keys()

    def newest(self, block_hash: BlockHash) -> BlockId | None:
        return self._newest.get(block_hash)

    def leading(self, hashes: Iterable[BlockHash]) -> tuple[BlockId, ...]:
        """Return one block for each of the leading `hashes`, up to the first hash without a block. Where several blocks
        have a hash, the one added last is returned."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            block = self._newest.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def copies(self, block_hash: BlockHash) -> tuple[BlockId, ...]:
        """Return the blocks that hold the content of `block_hash`, in the order in which they were added; empty if
        there are none."""
        return (*self._older.get(block_hash, ()), self._newest[block_hash]) if block_hash in self._newest else ()

    def hash_of(self, block: BlockId) -> BlockHash | None:
        return self._hashes[block]

    def parent_of(self, block: BlockId) -> BlockHash | None:
        """Return the hash of the block before a cached block in its prefix, None for a first block."""
        return self._parents[block]

    def is_cached(self, block: BlockId) -> bool:
        return self._hashes[block] is not None

    def extend(self, num_blocks: int) -> None:
        """Make room for the hashes of the blocks `[0, num_blocks)`; must be called before a block is used for the first
        time."""
        unused = num_blocks - len(self._hashes)
        self._hashes += [None] * unused
        self._parents += [None] * unused

    def add(self, block: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Assign a hash to a block and return True when no other block has this hash. `parent` is the hash of the block
        before it in the prefix, None for a first block. Raises AssertionError when `block` has a hash already."""
        assert self._hashes[block] is None, f"block {block} is published already"
        self._hashes[block] = block_hash
        self._parents[block] = parent
        older = self._newest.get(block_hash)
        self._newest[block_hash] = block
        if older is not None:
            self._older.setdefault(block_hash, []).append(older)
        return older is None

    def evict(self, block: BlockId) -> tuple[BlockHash, BlockHash | None] | None:
        """Remove the hash of a block; return the hash and its parent hash if no other block has the hash, else None.
        Raises AssertionError when the block has no hash."""
        block_hash, parent = self._hashes[block], self._parents[block]
        assert block_hash is not None, f"block {block} has no hash"
        self._hashes[block] = None
        self._parents[block] = None
        older = self._older.get(block_hash)
        if older is None:
            del self._newest[block_hash]
            return block_hash, parent
        if self._newest[block_hash] == block:
            self._newest[block_hash] = older.pop()
        else:
            older.remove(block)
        if not older:
            del self._older[block_hash]
        return None

    def check(self) -> None:
        """Raise AssertionError when the maps from block to hash and from hash to block disagree, or the index holds a
        hash without its parent."""
        cached = {BlockId(i): block_hash for i, block_hash in enumerate(self._hashes) if block_hash is not None}
        for block_hash in self._newest:
            for block in self.copies(block_hash):
                assert cached.pop(block, None) == block_hash, f"block {block} is no copy of {block_hash.hex()}"
                parent = self._parents[block]
                assert parent is None or parent in self._newest, f"{block_hash.hex()} is present without its parent"
        assert not cached, f"blocks {list(cached)} have hashes that cannot be found"
        assert all(self._older.values()) and self._older.keys() <= self._newest.keys(), "copies of nothing"
