"""Owns which device block holds the content of which name, and in which order copies of a name came; never knows who
holds a block."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tandem.core.ids import BlockHash, BlockId


class CachedBlockIndex:
    """A block has a name from the moment its content is computed, or on its way, until it is reused."""

    __slots__ = ("_names", "_newest", "_older", "_parents")

    def __init__(self) -> None:
        # By block, of those that were used at least once: its name, and the name of the block before it.
        self._names: list[BlockHash | None] = []
        self._parents: list[BlockHash | None] = []
        # The copy of a name that came last, and the others, oldest first.
        self._newest: dict[BlockHash, BlockId] = {}
        self._older: dict[BlockHash, list[BlockId]] = {}

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._newest)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._newest

    def all(self) -> Collection[BlockHash]:
        return self._newest.keys()

    def newest(self, name: BlockHash) -> BlockId | None:
        return self._newest.get(name)

    def leading(self, names: Iterable[BlockHash]) -> tuple[BlockId, ...]:
        """The newest copy of each, up to the first that has none."""
        blocks: list[BlockId] = []
        for name in names:
            block = self._newest.get(name)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def copies(self, name: BlockHash) -> tuple[BlockId, ...]:
        """The blocks that hold it, in the order in which they came."""
        return (*self._older.get(name, ()), self._newest[name]) if name in self._newest else ()

    def is_named(self, block: BlockId) -> bool:
        return self._names[block] is not None

    def extend(self, num_blocks: int) -> None:
        """Blocks `[0, num_blocks)` may be given names from now on."""
        unused = num_blocks - len(self._names)
        self._names += [None] * unused
        self._parents += [None] * unused

    def add(self, block: BlockId, name: BlockHash, parent: BlockHash | None) -> bool:
        """Name a block; True when no other has this name."""
        assert self._names[block] is None, f"block {block} is published already"
        self._names[block], self._parents[block] = name, parent
        older = self._newest.get(name)
        self._newest[name] = block
        if older is not None:
            self._older.setdefault(name, []).append(older)
        return older is None

    def evict(self, block: BlockId) -> tuple[BlockHash, BlockHash | None] | None:
        """Take a block's name off; the name and its parent when no other block has it."""
        name, parent = self._names[block], self._parents[block]
        assert name is not None, f"block {block} has no name"
        self._names[block] = self._parents[block] = None
        older = self._older.get(name)
        if older is None:
            del self._newest[name]
            return name, parent
        if self._newest[name] == block:
            self._newest[name] = older.pop()
        else:
            older.remove(block)
        if not older:
            del self._older[name]
        return None

    def check(self) -> None:
        """Raises AssertionError where blocks and names disagree, or a name is here without its parent."""
        named = {BlockId(i): name for i, name in enumerate(self._names) if name is not None}
        for name in self._newest:
            for block in self.copies(name):
                assert named.pop(block, None) == name, f"block {block} is no copy of {name.hex()}"
                parent = self._parents[block]
                assert parent is None or parent in self._newest, f"{name.hex()} is present without its parent"
        assert not named, f"blocks {list(named)} have names that cannot be found"
        assert all(self._older.values()) and self._older.keys() <= self._newest.keys(), "copies of nothing"
