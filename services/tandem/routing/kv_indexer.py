"""Keeps a prefix table true to what workers tell of themselves; never reads where they tell it.

Each life of a worker numbers its facts. What follows on what is known here is taken in, what is known already is
skipped, and behind a gap facts wait until a snapshot covers it. Until then the table keeps what it had: its hits are
hints, and old ones are better than none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing.prefix_index import PrefixTable

MAX_WAITING = 1 << 18
"""Facts of one worker that wait for its snapshot, 2 MiB; with more all are dropped, and a later snapshot is wanted."""
MAX_HEARD = 1 << 16
"""Workers whose last number is remembered."""


class WorkerKVEvents(NamedTuple):
    """What one life of a worker tells at a time. Without words it says how far its facts have come."""

    worker: WorkerId
    incarnation: Incarnation
    facts: KVEventBatch


class EventPosition(NamedTuple):
    """The number that the facts of one life have come to, whoever took them in."""

    incarnation: Incarnation
    end: int


class _WorkerStream:
    """What is known of one life: all facts before `next`; None until there is a snapshot."""

    __slots__ = ("next", "num_waiting", "ref", "waiting")

    def __init__(self, ref: WorkerRef) -> None:
        self.ref = ref
        self.next: int | None = None
        self.waiting: list[KVEventBatch] = []
        self.num_waiting = 0

    @property
    def is_new(self) -> bool:
        return self.next is None and not self.waiting

    def wait(self, facts: KVEventBatch) -> None:
        self.next = None
        if self.num_waiting > MAX_WAITING:
            self.waiting.clear()
            self.num_waiting = 0
        self.waiting.append(facts)
        self.num_waiting += 1 + len(facts.words)


class KVIndexer:
    """The only writer of `table`."""

    def __init__(self, table: PrefixTable) -> None:
        self.table = table
        self._followers: dict[WorkerId, _WorkerStream] = {}
        self._heard: dict[WorkerId, EventPosition] = {}

    def expect(self, workers: Collection[WorkerRef]) -> list[WorkerRef]:
        """These are alive and no others: what is known of others goes, of new ones a snapshot is wanted. Returns the
        others."""
        refs = {ref.id: ref for ref in workers}
        gone = [one.ref for one in self._followers.values() if refs.get(one.ref.id) != one.ref]
        for ref in gone:
            del self._followers[ref.id]
            self.table.drop(ref)
        for ref in workers:
            if ref.id not in self._followers:
                self._followers[ref.id] = _WorkerStream(ref)
        return gone

    def take(self, entry: WorkerKVEvents) -> None:
        """What one life tells. Entries of one life come in order, maybe more than once, maybe not all."""
        self._hear(entry)
        follower = self._followers.get(entry.worker)
        if follower is None or follower.ref.incarnation != entry.incarnation:
            return
        if entry.facts.first == 0 and follower.is_new and self.table.held(follower.ref) is None:
            # The beginning of a life needs no snapshot.
            follower.next = 0
            self.table.load(follower.ref, CompactBlockSet())
        if follower.next is None or entry.facts.first > follower.next:
            follower.wait(entry.facts)
        elif entry.facts.end > follower.next:
            self.table.write(follower.ref, entry.facts.words[follower.next - entry.facts.first :])
            follower.next = entry.facts.end

    def wanted(self) -> list[tuple[WorkerRef, int]]:
        """Workers of whom a snapshot is wanted, each with the number of facts that it must at least stand for."""
        return [(one.ref, self._least(one)) for one in list(self._followers.values()) if one.next is None]

    def load(self, worker: WorkerRef, number: int, held: CompactBlockSet) -> bool:
        """A snapshot that stands for the first `number` facts of this life. False when it is of no use, being too old
        or of a worker that is not expected."""
        follower = self._followers.get(worker.id)
        if follower is None or follower.ref != worker or number < self._least(follower):
            return False
        self.table.load(worker, held)
        follower.next, waiting = number, follower.waiting
        follower.waiting, follower.num_waiting = [], 0
        for facts in waiting:
            self.take(WorkerKVEvents(worker.id, worker.incarnation, facts))
        return True

    def doubt(self, worker: WorkerRef) -> None:
        """What is known of a worker has proven wrong: a snapshot of now is wanted."""
        follower = self._followers.get(worker.id)
        if follower is not None and follower.ref == worker:
            follower.next = None

    def _least(self, follower: _WorkerStream) -> int:
        if follower.waiting:
            return follower.waiting[0].first
        heard = self._heard.get(follower.ref.id)
        return heard.end if heard is not None and heard.incarnation == follower.ref.incarnation else 0

    def _hear(self, entry: WorkerKVEvents) -> None:
        """Also of those that nobody expects yet: what they told is past when they are."""
        heard = self._heard.pop(entry.worker, None)
        told = EventPosition(entry.incarnation, entry.facts.end)
        self._heard[entry.worker] = told if heard is None else max(heard, told)
        if len(self._heard) > MAX_HEARD:
            del self._heard[next(iter(self._heard))]

    def __repr__(self) -> str:
        return f"<mirror of {len(self._followers)} workers, {len(self.wanted())} wanted, {self.table!r}>"
