"""Keep the free blocks of a pool in the order in which they will be reused.

A free block that has a prefix hash is cached: its content can still be used. The list has four parts, front to back:
- blocks without a hash that were used before (last in, first out);
- blocks that were not used yet (by id);
- cached blocks that no tenant retains (first in, first out);
- cached blocks that a tenant retains, see `kv.retained_prefixes` (first in, first out).

Cached blocks leave the middle of their part when a prefix is hit or its retention changes. Such a block leaves a stale
entry, which is dropped when it reaches the front, so that a large pool costs 8 bytes per free block and nothing before
a block's first use.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from tandem.core.ids import BlockId

LEAST_STALE = 64
"""Number of stale entries below which rebuilding a queue is not worth its cost."""


class _Queue:
    """Keep blocks first in, first out, and remove any of them in constant time."""

    def __init__(self) -> None:
        self._blocks: deque[BlockId] = deque()
        # Number of stale entries by block. The oldest entries of a block are the stale ones, so its newest entry may be
        # live.
        self._stale: Counter[BlockId] = Counter()
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._blocks) - self._num_stale

    def __iter__(self) -> Iterator[BlockId]:
        stale = self._stale.copy()
        for block in self._blocks:
            if stale[block]:
                stale[block] -= 1
            else:
                yield block

    def append(self, block: BlockId) -> None:
        self._blocks.append(block)

    def popleft(self) -> BlockId:
        while True:
            block = self._blocks.popleft()
            if not (self._num_stale and self._stale[block]):
                return block
            self._num_stale -= 1
            self._stale[block] -= 1
            if not self._stale[block]:
                del self._stale[block]

    def remove(self, block: BlockId) -> None:
        self._stale[block] += 1
        self._num_stale += 1
        if self._num_stale > LEAST_STALE + len(self):
            self._blocks = deque(self)
            self._stale.clear()
            self._num_stale = 0


class FreeList:
    """Keep the ids of free blocks in the order of reuse.

    `ids`: ids of all blocks of the pool, from 0 up; all are free at first. `num_used`: number of blocks that were taken
    at least once, which are the blocks `[0, num_used)`.
    """

    def __init__(self, ids: Sequence[BlockId]) -> None:
        self._ids = ids
        self._front: list[BlockId] = []
        self.num_used = 0
        self._hashed = _Queue()
        self._retained = _Queue()

    def __len__(self) -> int:
        return len(self._front) + len(self._ids) - self.num_used + self.num_hashed

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate in the order of reuse."""
        yield from reversed(self._front)
        yield from islice(self._ids, self.num_used, None)
        yield from self._hashed
        yield from self._retained

    @property
    def num_hashed(self) -> int:
        """Count the cached free blocks, which are those that had a prefix hash when they were freed."""
        return len(self._hashed) + len(self._retained)

    def free(self, block: BlockId, *, is_hashed: bool, is_retained: bool = False) -> None:
        """Add a block that has no holder any more to the free list.

        `is_hashed`: the block has a prefix hash, so its content is cached. `is_retained`: a tenant retains this hash. A
        block without a hash goes to the front of the list and is reused next. A block with a hash goes behind all
        blocks that are not retained, and a retained one to the end of the list.
        """
        if is_hashed:
            self._part(is_retained).append(block)
        else:
            self._front.append(block)

    def take(self, number: int) -> list[BlockId]:
        """Remove the first `number` blocks of the list and return them in the order of reuse. Raises IndexError, and
        takes none, when fewer are free."""
        if number > len(self):
            raise IndexError(f"{number} of {len(self)} free blocks")
        num_front = min(number, len(self._front))
        taken = self._front[: -num_front - 1 : -1]
        del self._front[len(self._front) - num_front :]
        stop = min(len(self._ids), self.num_used + number - num_front)
        taken += self._ids[self.num_used : stop]
        self.num_used = stop
        while len(taken) < number:
            taken.append((self._hashed if len(self._hashed) else self._retained).popleft())
        return taken

    def remove(self, block: BlockId, *, is_retained: bool = False) -> None:
        """Remove a cached block from the free list, because a prefix hit or a lease uses its content again.

        `block` must have been added by `free` with `is_hashed`. `is_retained`: whether the block is in the list's part
        of retained blocks (True) or in the part of cached blocks that no tenant retains (False).
        """
        self._part(is_retained).remove(block)

    def move(self, block: BlockId, *, is_retained: bool) -> None:
        """Move a cached free block to the other of the two parts for cached blocks, because its retention has begun or
        ended.

        With `is_retained` the block goes from the part of blocks that no tenant retains to the end of the retained
        blocks. Otherwise it goes from the retained blocks to the end of the part of blocks that no tenant retains.
        """
        self._part(not is_retained).remove(block)
        self._part(is_retained).append(block)

    def _part(self, is_retained: bool) -> _Queue:
        return self._retained if is_retained else self._hashed
