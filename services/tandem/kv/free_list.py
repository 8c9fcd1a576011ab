"""Blocks that nobody holds, in the order in which they are reused; never knows what a block contains.

An intrusive doubly linked list, so that a cached block is taken out of the middle in O(1) when its prefix is hit.
The front is reused first. Only `BlockPool` touches the links.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.ids import BlockHash, BlockId


class Block:
    """One physical block. `hash` is set from the moment its content is computed until it is reused."""

    __slots__ = ("hash", "id", "leases", "next", "prev", "reads", "tables")

    def __init__(self, block_id: BlockId) -> None:
        self.id = block_id
        self.hash: BlockHash | None = None
        self.tables = 0
        self.leases = 0
        self.reads = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def refs(self) -> int:
        return self.tables + self.leases + self.reads

    def __repr__(self) -> str:
        name = self.hash.hex()[:8] if self.hash else "-"
        return f"<block {self.id} {name} tables={self.tables} leases={self.leases} reads={self.reads}>"


class FreeList:
    """Front: never used or without a hash. Back: freed last."""

    def __init__(self) -> None:
        self._front = Block(BlockId(-1))
        self._back = Block(BlockId(-2))
        self._front.next = self._back
        self._back.prev = self._front
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._front.next
        while block is not None and block is not self._back:
            yield block
            block = block.next

    def push_front(self, block: Block) -> None:
        self._link(self._front, block)

    def push_back(self, block: Block) -> None:
        assert self._back.prev is not None
        self._link(self._back.prev, block)

    def pop_front(self) -> Block:
        block = self._front.next
        if block is None or block is self._back:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        assert block.prev is not None and block.next is not None, f"{block!r} is not in the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._size -= 1

    def _link(self, left: Block, block: Block) -> None:
        assert block.prev is None and block.next is None, f"{block!r} is in the free list already"
        right = left.next
        assert right is not None
        left.next = right.prev = block
        block.prev, block.next = left, right
        self._size += 1
