"""Number the KV events of one worker, queue them until they are published, and keep the set of blocks that results.

Events keep the pool's order, and a pool publishes a block after its parent and evicts it before its parent. So the set
of blocks after any number of events holds the parents of all its blocks.
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
    """Consecutive KV events of one incarnation of a worker. `first`: number of the batch's first event, counted from 0
    at the start of the worker. `words`: one word per event (`kv.kv_event_codec`)."""

    first: int
    words: array[int]

    @property
    def end(self) -> int:
        """Return the number of the first event after the batch."""
        return self.first + len(self.words)


class KVEventLog:
    """Number the KV events of a worker, keep the events that are not published yet, and keep the set of blocks that the
    worker holds after all events (`held`).

    `stride`: only each `stride`-th block of a prefix is logged. `capacity`: number of blocks that the worker can hold.
    `max_waiting`: most events that wait to be published. When there are more, all waiting events are dropped and
    `has_lost` is set; the caller can then only publish `held` as a whole. Raises ValueError for a stride below 1.
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
        # Position of a block behind the last logged block of its chain, modulo the stride; only kept for strides above
        # 1.
        self._beyond: dict[BlockHash, int] = {}

    @property
    def end(self) -> int:
        """Return the number that the next event will get."""
        return self._first + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, facts: Iterable[KVFact]) -> None:
        """Append KV events in order, and apply them to `held`. Events of blocks that `stride` leaves out are
        ignored."""
        words = array("Q", map(encode_event, facts if self._stride == 1 else filter(self._counts, facts)))
        self.held.write(words)
        self._waiting += words
        if len(self._waiting) > self._max_waiting:
            self.has_lost = True
            self.acknowledge(self.end)

    def waiting(self, most: int, after: int = 0) -> KVEventBatch:
        """Return the oldest events that are not published yet, as one batch, which may be empty.

        `after`: number of the oldest unpublished events to skip. `most`: largest number of events in the batch.
        """
        return KVEventBatch(self._first + after, self._waiting[after : after + most])

    def acknowledge(self, end: int) -> None:
        """Drop the waiting events with numbers below `end`, because they were published. Does nothing for events that
        were dropped already."""
        count = max(0, end - self._first)
        del self._waiting[:count]
        self._first += count

    def __repr__(self) -> str:
        return f"<log of {self.end} facts, {len(self._waiting)} waiting, {self.held!r}>"

    def _counts(self, fact: KVFact) -> bool:
        """Return whether the event's block is logged, which its position in its chain decides."""
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
