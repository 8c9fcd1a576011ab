"""Keep a prefix table in step with the KV events of workers; the caller reads the event streams.

The KV events of each incarnation of a worker are numbered. Events that continue the known sequence are applied, known
events are skipped, and events behind a gap wait for a snapshot that covers the gap. Until then the table keeps its old
entries: its hits are hints, and old hints are better than none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing.prefix_index import PrefixTable

MAX_WAITING = 1 << 18
"""Most events of one worker that are kept until its snapshot is loaded, 2 MiB. When there are more, all are dropped,
and a later snapshot is needed."""
MAX_POSITIONS = 1 << 16
"""Most workers for which the number of the last received event is stored."""


class WorkerKVEvents(NamedTuple):
    """A batch of consecutive KV events of one incarnation of a worker. `facts`: the events.

    An empty batch shows only which number the next event will have.
    """

    worker: WorkerId
    incarnation: Incarnation
    facts: KVEventBatch


class EventPosition(NamedTuple):
    """Position in the KV event stream of one worker: the number `end` of the next event of one incarnation.

    All events before `end` have been received, whether or not they were applied.
    """

    incarnation: Incarnation
    end: int


class _WorkerStream:
    """Position in the event stream of one incarnation: all events before `next` are applied; `next` is None until a
    snapshot is loaded."""

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
    """Keep `table`, a copy of the prefix index, up to date by applying the KV events and snapshots of workers to it.
    Nothing else may write to `table`.

    The caller passes events to `take`, fetches the snapshots that `missing_snapshots` names, and passes them to `load`.
    """

    def __init__(self, table: PrefixTable) -> None:
        self.table = table
        self._streams: dict[WorkerId, _WorkerStream] = {}
        self._positions: dict[WorkerId, EventPosition] = {}

    def set_workers(self, workers: Collection[WorkerRef]) -> list[WorkerRef]:
        """Replace the live workers by `workers`, and return the former workers, which are no longer live. Their blocks
        are dropped from the table.

        A restarted worker counts as a new worker, and its earlier incarnation as a former one. A new worker needs a
        snapshot, unless all its KV events since its start are received.
        """
        refs = {ref.id: ref for ref in workers}
        gone = [stream.ref for stream in self._streams.values() if refs.get(stream.ref.id) != stream.ref]
        for ref in gone:
            del self._streams[ref.id]
            self.table.drop(ref)
        for ref in workers:
            if ref.id not in self._streams:
                self._streams[ref.id] = _WorkerStream(ref)
        return gone

    def take(self, entry: WorkerKVEvents) -> None:
        """Apply a batch of a worker's KV events to the table.

        Events that were applied before, and events of workers that are not live, are skipped. Batches of one
        incarnation must arrive in order, but may be repeated or missing. A batch behind a gap is kept until `load` is
        called with a snapshot that covers the gap.
        """
        self._record_position(entry)
        stream = self._streams.get(entry.worker)
        if stream is None or stream.ref.incarnation != entry.incarnation:
            return
        if entry.facts.first == 0 and stream.is_new and self.table.held(stream.ref) is None:
            # The first events of an incarnation need no snapshot.
            stream.next = 0
            self.table.load(stream.ref, CompactBlockSet())
        if stream.next is None or entry.facts.first > stream.next:
            stream.wait(entry.facts)
        elif entry.facts.end > stream.next:
            self.table.write(stream.ref, entry.facts.words[stream.next - entry.facts.first :])
            stream.next = entry.facts.end

    def missing_snapshots(self) -> list[tuple[WorkerRef, int]]:
        """Return the workers that need a snapshot, each as a pair (worker, number): the snapshot must cover at least
        the first `number` KV events of the worker."""
        return [
            (stream.ref, self._least_number(stream)) for stream in list(self._streams.values()) if stream.next is None
        ]

    def load(self, worker: WorkerRef, number: int, held: CompactBlockSet) -> bool:
        """Replace the table's blocks of `worker` by `held`, a snapshot that covers its first `number` events, and apply
        the later events that were kept.

        Returns False and changes nothing when the snapshot is too old or this incarnation of the worker is not live.
        """
        stream = self._streams.get(worker.id)
        if stream is None or stream.ref != worker or number < self._least_number(stream):
            return False
        self.table.load(worker, held)
        stream.next = number
        waiting = stream.waiting
        stream.waiting = []
        stream.num_waiting = 0
        for facts in waiting:
            self.take(WorkerKVEvents(worker.id, worker.incarnation, facts))
        return True

    def suspect(self, worker: WorkerRef) -> None:
        """Require a new snapshot of a worker whose table entries have proven wrong; the entries stay until it is
        loaded. Does nothing when this incarnation of the worker is not live."""
        stream = self._streams.get(worker.id)
        if stream is not None and stream.ref == worker:
            stream.next = None

    def _least_number(self, stream: _WorkerStream) -> int:
        if stream.waiting:
            return stream.waiting[0].first
        previous = self._positions.get(stream.ref.id)
        return previous.end if previous is not None and previous.incarnation == stream.ref.incarnation else 0

    def _record_position(self, entry: WorkerKVEvents) -> None:
        """Record the number of the next KV event of a worker, also for a worker that is not live yet: once it is live,
        its snapshot must cover the events before this number."""
        previous = self._positions.pop(entry.worker, None)
        position = EventPosition(entry.incarnation, entry.facts.end)
        self._positions[entry.worker] = position if previous is None else max(previous, position)
        if len(self._positions) > MAX_POSITIONS:
            del self._positions[next(iter(self._positions))]

    def __repr__(self) -> str:
        return f"<KV indexer of {len(self._streams)} workers, {len(self.missing_snapshots())} stale, {self.table!r}>"
