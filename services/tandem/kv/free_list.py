"""Keep the free blocks in the order in which they will be reused.

The list has four parts, front to back: blocks freed without a hash (last in, first out), blocks that were not used yet
(by id), blocks freed with a hash (first in, first out), and of these the retained ones. Only the last two parts are
taken from in the middle, when a prefix is hit or its retention changes: the taken block leaves a stale entry, which is
dropped when it reaches the front, so that a large pool costs 8 bytes per free block and nothing before a block's first
use.
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

    All of `ids` are free at first; the blocks `[0, num_used)` were taken at least once.
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
        """Count the free blocks that had a hash when they were freed, which are the cached ones."""
        return len(self._hashed) + len(self._retained)

    def free(self, block: BlockId, *, is_hashed: bool, is_retained: bool = False) -> None:
        """Add a block that has no holder any more: at the front (reused next) without a hash, with one behind those
        that were freed before it. `is_retained`: behind all that are not."""
        if is_hashed:
            self._part(is_retained).append(block)
        else:
            self._front.append(block)

    def take(self, number: int) -> list[BlockId]:
        """Remove and return the first `number` blocks in the order of reuse. Raises IndexError, and takes none, when
        fewer are free."""
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
        """Remove a block that was freed with a hash, because a prefix hit uses it again. `is_retained`: whether it is
        among these."""
        self._part(is_retained).remove(block)

    def move(self, block: BlockId, *, is_retained: bool) -> None:
        """Put a block that was freed with a hash at the end of the retained ones, or of those that are not."""
        self._part(not is_retained).remove(block)
        self._part(is_retained).append(block)

    def _part(self, is_retained: bool) -> _Queue:
        return self._retained if is_retained else self._hashed
