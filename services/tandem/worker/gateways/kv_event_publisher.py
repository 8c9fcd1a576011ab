"""Tells the prefix index what this worker's blocks have become, in batches; never waits on the engine or holds it up.

While Redis does not answer facts wait, in order. When they become too many they are dropped, and a snapshot says what
they came to as soon as it can be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import Sequence

from tandem.core.clock import Clock
from tandem.core.config import RedisConfig
from tandem.core.events import KVFact
from tandem.core.ids import WorkerRef
from tandem.kv.kv_event_log import KVEventBatch, KVEventLog
from tandem.routing.kv_indexer import WorkerKVEvents
from tandem.stores.index_format import IndexSnapshot
from tandem.stores.prefix_index import MAX_FACTS, WANT_TTL_S, IndexUnavailable, IndexWriter
from tandem.stores.redis_health import RedisHealth

BATCH_S = 0.02
"""Facts of so long go together: what a gateway learns later by."""
RENEW_S = 0.25
"""Between two looks whether the snapshot is there and whether somebody wants another."""
BEACON_S = 2.0
"""Between two entries that only say how far the facts have come. If the last ones are lost in Redis, or cut off before
a slow gateway read them, and no more follow, this is what shows it."""
RETRY_S = 0.5
MAX_ENTRIES_AT_ONCE = 64
MAX_WAITING = 1 << 17
"""Facts that wait for Redis, 1 MiB."""
MIN_BETWEEN_SNAPSHOTS = 256
"""Facts; a worker that holds next to nothing need not write that again and again."""
SLICE_SLOTS = 1 << 16
"""Looked through at once for a snapshot: a millisecond of the event loop."""


class KVEventPublisher:
    """Owns `writer` and closes it."""

    def __init__(self, writer: IndexWriter, worker: WorkerRef, log: KVEventLog, capacity: int, clock: Clock) -> None:
        """`capacity`: indexed blocks that the worker can hold."""
        self._writer = writer
        self._worker = worker
        self._facts = log
        self._capacity = capacity
        self._clock = clock
        # Filled on the engine's thread, emptied on the event loop: a deque needs no lock for that.
        self._inbox: deque[Sequence[KVFact]] = deque()
        self._renew_at = self._beacon_at = self._written_at = 0.0
        self._is_reachable = True
        # How many facts the newest snapshot stands for; None: there is none in Redis.
        self._covered: int | None = None

    def told(self, facts: Sequence[KVFact]) -> None:
        """What became of blocks, in order; from one thread, whichever."""
        self._inbox.append(facts)

    async def run(self) -> None:
        """Publish until cancelled, then withdraw as well as Redis allows."""
        try:
            while True:
                await asyncio.sleep(BATCH_S if self._is_reachable else RETRY_S)
                await self.turn()
        finally:
            with contextlib.suppress(IndexUnavailable):
                await self._writer.withdraw()
            await self._writer.close()

    async def turn(self) -> None:
        """Tell what there is to tell, now."""
        self._take_inbox()
        try:
            if self._clock.now() >= self._renew_at:
                await self._renew()
                self._renew_at = self._clock.now() + RENEW_S
            await self._tell()
            self._is_reachable = True
        except IndexUnavailable:
            self._is_reachable = False
            self._covered = None  # another server may answer next, or this one with what it had earlier

    def _take_inbox(self) -> None:
        while self._inbox:
            self._facts.add(self._inbox.popleft())

    async def _tell(self) -> None:
        """Everything that waits; a snapshot where that is due."""
        while self._facts.num_waiting:
            entries = self._entries()
            await self._writer.tell(entries)
            self._facts.acknowledge(entries[-1].facts.end)
        if self._clock.now() >= self._beacon_at:
            await self._writer.tell([self._entry(self._facts.waiting(0))])
            self._beacon_at = self._clock.now() + BEACON_S
        if self._facts.has_lost or self._covered is None or self._is_behind(self._covered):
            await self._write()

    async def _renew(self) -> None:
        wanted = await self._writer.renew()
        if wanted is None:
            self._covered = None
        elif self._covered is not None and wanted and (wanted > self._covered or self._is_missed()):
            await self._write()

    def _is_missed(self) -> bool:
        """Somebody wants a snapshot still, long after one was written that would do: Redis does not have that one."""
        return self._clock.now() - self._written_at > WANT_TTL_S

    def _is_behind(self, covered: int) -> bool:
        return self._facts.end - covered > max(MIN_BETWEEN_SNAPSHOTS, len(self._facts.held) // 2)

    def _entries(self) -> list[WorkerKVEvents]:
        starts = range(0, min(self._facts.num_waiting, MAX_ENTRIES_AT_ONCE * MAX_FACTS), MAX_FACTS)
        parts = (self._facts.waiting(MAX_FACTS, start) for start in starts)
        return [self._entry(facts) for facts in parts]

    def _entry(self, facts: KVEventBatch) -> WorkerKVEvents:
        return WorkerKVEvents(self._worker.id, self._worker.incarnation, facts)

    async def _write(self) -> None:
        """A snapshot of this moment, put together without holding up the event loop."""
        number, slots = self._facts.end, self._facts.held.slots()
        self._facts.has_lost = False
        words = array("Q")
        for start in range(0, len(slots), SLICE_SLOTS):
            words.extend(filter(None, slots[start : start + SLICE_SLOTS]))
            await asyncio.sleep(0)
        try:
            await self._writer.write(IndexSnapshot(self._worker.incarnation, number, self._capacity, words))
        except IndexUnavailable:
            self._covered = None
            raise
        self._covered = number
        self._written_at = self._clock.now()

    def __repr__(self) -> str:
        return f"<publisher of {self._worker}: {self._facts!r}>"


def compose_publisher(
    config: RedisConfig, worker: WorkerRef, num_blocks: int, clock: Clock, health: RedisHealth
) -> KVEventPublisher | None:
    """None where nobody listens. `num_blocks` that the worker can hold."""
    if not config.url:
        return None
    writer = IndexWriter(config.url, config.namespace, worker, health=health)
    capacity = num_blocks // config.index_stride
    return KVEventPublisher(writer, worker, KVEventLog(config.index_stride, num_blocks, MAX_WAITING), capacity, clock)
