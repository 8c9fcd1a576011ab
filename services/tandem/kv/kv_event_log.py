"""What a worker tells of its cached blocks, numbered, and what that comes to so far; never says to whom or when.

Facts keep the pool's order, and a pool publishes a block after its parent and loses it before: so what any prefix of
the log comes to has the parents of all its blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored, KVFact
from tandem.core.ids import BlockHash
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.kv_event_codec import encode_event


class KVEventBatch(NamedTuple):
    """Consecutive facts of one worker's life as words (`kv.prefix_word`); the first is its `first`-th, from 0 on."""

    first: int
    words: array[int]

    @property
    def end(self) -> int:
        """The number of the fact after these."""
        return self.first + len(self.words)


class KVEventLog:
    """`stride`: only each `stride`-th block of a chain is told of. `capacity`: of the worker, in blocks.

    At most `max_waiting` facts wait to be told: beyond it all are dropped, `has_lost` is set, and only what they come
    to is left to tell.
    """

    def __init__(self, stride: int, capacity: int, max_waiting: int) -> None:
        if stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}")
        self.held = CompactBlockSet(capacity // stride)
        self.has_lost = False
        self._stride = stride
        self._max_waiting = max_waiting
        self._waiting: array[int] = array("Q")
        self._first = 0
        # Blocks after the last one of their chain that is told of; nothing with a stride of 1.
        self._beyond: dict[BlockHash, int] = {}

    @property
    def end(self) -> int:
        """The number of the next fact."""
        return self._first + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, facts: Iterable[KVFact]) -> None:
        """Take in what became of blocks, in order."""
        words = array("Q", map(encode_event, facts if self._stride == 1 else filter(self._counts, facts)))
        self.held.write(words)
        self._waiting += words
        if len(self._waiting) > self._max_waiting:
            self.has_lost = True
            self.told(self.end)

    def waiting(self, most: int, after: int = 0) -> KVEventBatch:
        """The next facts to be told, at most `most`, those after the first `after` that wait."""
        return KVEventBatch(self._first + after, self._waiting[after : after + most])

    def told(self, end: int) -> None:
        """Those before number `end` wait no more; of them some may have been dropped meanwhile."""
        count = max(0, end - self._first)
        del self._waiting[:count]
        self._first += count

    def __repr__(self) -> str:
        return f"<log of {self.end} facts, {len(self._waiting)} waiting, {self.held!r}>"

    def _counts(self, fact: KVFact) -> bool:
        """Whether a block is one of those that are told of, by its place in the chain."""
        beyond = 0
        match fact:
            case BlockStored():
                before = 0 if fact.parent is None else self._beyond.get(fact.parent, 0)
                beyond = self._beyond[fact.hash] = (before + 1) % self._stride
            case BlockEvicted():
                beyond = self._beyond.pop(fact.hash)
            case BlockOffloaded():
                beyond = self._beyond[fact.hash]
        return beyond == 0
