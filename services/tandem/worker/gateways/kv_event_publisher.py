"""Publish this worker's cached-block events to the prefix index in batches, without delaying the engine.

While Redis is unreachable, events wait in order. When too many wait they are dropped, and a snapshot replaces them as
soon as it can be written.
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
from tandem.stores.prefix_index import MAX_FACTS, REQUEST_TTL_S, IndexSnapshot, IndexWriter
from tandem.stores.redis_client import RedisHealth, StoreUnavailable

BATCH_S = 0.02
"""Seconds for which events are collected into one batch. Gateways learn of an event up to this much later."""
RENEW_S = 0.25
"""Seconds between two checks whether the snapshot exists and whether a gateway has requested a new one."""
BEACON_S = 2.0
"""Seconds between two stream entries that only carry the number of the last event. When the last events were lost in
Redis, or trimmed before a slow gateway read them, and no more events follow, such an entry reveals the gap."""
RETRY_S = 0.5
"""Seconds between two attempts while Redis is unreachable."""
MAX_ENTRIES_AT_ONCE = 64
"""Stream entries written in one call."""
MAX_WAITING = 1 << 17
"""Events that may wait for Redis; 1 MiB."""
MIN_BETWEEN_SNAPSHOTS = 256
"""Fewest events between two snapshots, so that a worker with few blocks does not write snapshots all the time."""
SLICE_SLOTS = 1 << 16
"""Slots of the table of cached blocks that are copied to a snapshot at once; this takes about a millisecond of the
event loop."""


class KVEventPublisher:
    """Write the KV events of one worker to the prefix index in Redis in batches, so that gateways know which blocks the
    worker has cached.

    The caller passes events to `on_kv_events` and runs `run` as a task. The publisher owns `writer`, which `run` closes
    at its end."""

    def __init__(self, writer: IndexWriter, worker: WorkerRef, log: KVEventLog, capacity: int, clock: Clock) -> None:
        """Create the publisher, which publishes nothing until `run` is called. `writer`: writes to the prefix index.
        `worker`: the worker that has the blocks. `log`: numbers the events and keeps those that wait. `capacity`: most
        blocks of this worker that the index lists at once."""
        self._writer = writer
        self._worker = worker
        self._facts = log
        self._capacity = capacity
        self._clock = clock
        # Filled on the engine's thread and emptied on the event loop; a deque needs no lock for that.
        self._inbox: deque[Sequence[KVFact]] = deque()
        self._renew_at = 0.0
        self._beacon_at = 0.0
        self._written_at = 0.0
        self._is_reachable = True
        # Number of the last event in the newest snapshot; None: Redis has none.
        self._covered: int | None = None

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        """Queue KV events (blocks stored, evicted or offloaded), oldest first, to be published by `run`; returns
        without waiting.

        May be called from a thread other than the event loop's, but always from the same one, so that events stay in
        order."""
        self._inbox.append(facts)

    async def run(self) -> None:
        """Publish queued events until cancelled: every `BATCH_S` seconds, or every `RETRY_S` seconds while Redis is
        unreachable.

        At the end the worker is removed from the prefix index, if Redis is reachable, and the writer is closed.
        """
        try:
            while True:
                await asyncio.sleep(BATCH_S if self._is_reachable else RETRY_S)
                await self.turn()
        finally:
            with contextlib.suppress(StoreUnavailable):
                await self._writer.withdraw()
            await self._writer.close()

    async def turn(self) -> None:
        """Publish all queued events once, and a snapshot of all cached blocks if one is due.

        A snapshot is due where Redis has none, events were dropped, many events followed the last snapshot, or a
        gateway has requested one. While Redis is unreachable the events stay queued; StoreUnavailable is not raised.
        """
        while self._inbox:
            self._facts.add(self._inbox.popleft())
        try:
            if self._clock.now() >= self._renew_at:
                await self._renew()
                self._renew_at = self._clock.now() + RENEW_S
            await self._publish()
            self._is_reachable = True
        except StoreUnavailable:
            self._is_reachable = False
            self._covered = None  # the next reply may come from another server, or from one with older data

    async def _publish(self) -> None:
        """Write all waiting events, and a beacon or a snapshot where one is due."""
        while self._facts.num_waiting:
            entries = self._entries()
            await self._writer.append(entries)
            self._facts.acknowledge(entries[-1].facts.end)
        if self._clock.now() >= self._beacon_at:
            await self._writer.append([self._entry(self._facts.waiting(0))])
            self._beacon_at = self._clock.now() + BEACON_S
        if self._facts.has_lost or self._covered is None or self._is_behind(self._covered):
            await self._write()

    async def _renew(self) -> None:
        requested = await self._writer.renew()
        if requested is None:
            self._covered = None
        elif self._covered is not None and requested and (requested > self._covered or self._is_missed()):
            await self._write()

    def _is_missed(self) -> bool:
        """Return whether the last snapshot was written longer ago than a gateway's request for a snapshot lasts. A
        request that exists then is newer than the snapshot, so Redis has lost the snapshot."""
        return self._clock.now() - self._written_at > REQUEST_TTL_S

    def _is_behind(self, covered: int) -> bool:
        return self._facts.end - covered > max(MIN_BETWEEN_SNAPSHOTS, len(self._facts.held) // 2)

    def _entries(self) -> list[WorkerKVEvents]:
        starts = range(0, min(self._facts.num_waiting, MAX_ENTRIES_AT_ONCE * MAX_FACTS), MAX_FACTS)
        parts = (self._facts.waiting(MAX_FACTS, start) for start in starts)
        return [self._entry(facts) for facts in parts]

    def _entry(self, facts: KVEventBatch) -> WorkerKVEvents:
        return WorkerKVEvents(self._worker.id, self._worker.incarnation, facts)

    async def _write(self) -> None:
        """Write a snapshot of the current state, copied in slices so that the event loop is not blocked."""
        number, slots = self._facts.end, self._facts.held.slots()
        self._facts.has_lost = False
        words = array("Q")
        for start in range(0, len(slots), SLICE_SLOTS):
            words.extend(filter(None, slots[start : start + SLICE_SLOTS]))
            await asyncio.sleep(0)
        try:
            await self._writer.write(IndexSnapshot(self._worker.incarnation, number, self._capacity, words))
        except StoreUnavailable:
            self._covered = None
            raise
        self._covered = number
        self._written_at = self._clock.now()

    def __repr__(self) -> str:
        return f"<publisher of {self._worker}: {self._facts!r}>"


def compose_publisher(
    config: RedisConfig, worker: WorkerRef, num_blocks: int, clock: Clock, health: RedisHealth
) -> KVEventPublisher | None:
    """Create and return the publisher of the cached blocks of `worker`; return None when `config` names no Redis.
    `num_blocks`: number of blocks that the worker can hold in device and host memory together. `health`: records
    whether Redis executes the publisher's commands."""
    if not config.url:
        return None
    writer = IndexWriter(config.url, config.namespace, worker, health=health)
    capacity = num_blocks // config.index_stride
    return KVEventPublisher(writer, worker, KVEventLog(config.index_stride, num_blocks, MAX_WAITING), capacity, clock)
