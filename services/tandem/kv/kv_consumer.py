"""Decide, on the consumer's side of every hand-off, which blocks are read from whom into which local blocks.

Decisions are returned as values (`StartRead`, `RequestRemainder`, `KVComplete`, ...) for the table's owner to carry
out. A read cannot be aborted, so blocks under a read are released only by `ReadEnded`: when the transport reports that
the read ended, or has proven that the connection to the peer is torn down as a whole. Times are seconds of the caller's
clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import Announcement, PullEvent, PullState, next_pull
from tandem.kv.pull import PrefixFetchTerms, Pull
from tandem.kv.pull_actions import (
    KVComplete,
    PullFailed,
    PullOutcome,
    ReadEnded,
    RequestRemainder,
    StartRead,
    TearDownProducer,
)


@dataclass(slots=True)
class _InflightRead:
    pull: Pull
    first_index: int
    blocks: tuple[BlockId, ...]
    abandoned_at: float | None = None
    quarantined: bool = False


class PullTable:
    """Own the open pulls of one consumer, one per job, and their reads, which may outlive the pull. `block_size` in
    tokens."""

    def __init__(self, *, pull_timeout_s: float, drain_timeout_s: float, block_size: int = 1) -> None:
        self._block_size = block_size
        self._pull_timeout_s = pull_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._pulls: dict[HandoffKey, Pull] = {}
        self._by_job: dict[JobKey, Pull] = {}
        self._reads: dict[int, _InflightRead] = {}
        self._torn: set[WorkerRef] = set()
        self._num_reads = 0

    # ---- events of the job and the source

    def open(self, key: HandoffKey, job: JobKey, source: WorkerRef, now: float) -> None:
        """Open a pull that waits for a source's announcements. The caller makes sure that only one job pulls a
        hand-off."""
        self._add(Pull(key, job, source, now, self._pull_timeout_s))

    def open_prefix_fetch(
        self, key: HandoffKey, job: JobKey, source: WorkerRef, prefix_fetch: PrefixFetchTerms, now: float
    ) -> None:
        """Open a pull of a cached prefix; its local blocks follow with `granted`."""
        self._add(Pull(key, job, source, now, self._pull_timeout_s, prefix_fetch))

    def find(self, key: HandoffKey) -> Pull | None:
        pull = self._pulls.get(key)
        return pull if pull is not None and pull.is_live else None

    def of_job(self, job: JobKey) -> Pull | None:
        return self._by_job.get(job)

    def granted(
        self,
        job: JobKey,
        blocks: tuple[BlockId, ...],
        num_hits: int,
        num_known: int,
        now: float,
        *,
        num_writable: int | None = None,
    ) -> list[PullOutcome]:
        """Record the local blocks of a job and start reading. Blocks `[num_hits, num_known)` are to be read, unless the
        source has already announced another number; the first `num_writable` blocks (None: all) may be written now."""
        pull = self._by_job[job]
        pull.state = next_pull(pull.state, PullEvent.GRANTED)
        pull.blocks = blocks
        pull.num_hits = num_hits
        pull.num_writable = len(blocks) if num_writable is None else num_writable
        pull.num_ready = num_hits
        pull.num_known = pull.num_final_blocks(self._block_size) if pull.has_last_announcement else num_known
        pull.next_index = num_hits
        pull.progress_at = now
        return self._read_on(pull, now)

    def grown(self, job: JobKey, blocks: tuple[BlockId, ...], num_writable: int) -> None:
        """Record that a job's blocks were extended to `blocks`, which start with the blocks it had before."""
        pull = self._by_job[job]
        assert blocks[: len(pull.blocks)] == pull.blocks, f"{pull!r} got other blocks"
        pull.blocks = blocks
        pull.num_writable = num_writable

    def writable(self, job: JobKey, num_writable: int, now: float) -> list[PullOutcome]:
        """Record that the first `num_writable` blocks may be written now, and start reading into them."""
        pull = self._by_job[job]
        pull.num_writable = num_writable
        return self._read_on(pull, now)

    def announced(self, message: Announcement, now: float) -> list[PullOutcome]:
        """Record an announcement and start reading. Blocks that were announced before are skipped; a gap ends the
        pull."""
        pull = self.find(message.key)
        if pull is None:
            return []
        if message.first_index > pull.num_offered:
            return self.abandon(pull.job, ErrorKind.KV_LOST, "an announcement is missing", now)
        if not pull.was_announced:
            pull.was_announced = True
            pull.first_announced_at = now
            pull.progress_at = now
        elif message.first_index == 0:
            # A new stream repeats all announcements; a request for the remainder on the old stream may be lost.
            pull.remainder_requested = False
        elif pull.is_prefix_fetch:
            pull.progress_at = now
        pull.offered.extend(message.blocks[pull.num_offered - message.first_index :])
        pull.is_migrating = message.is_migrating
        pull.num_computed = max(pull.num_computed, message.num_computed)
        if not pull.has_last_announcement and (message.first_tokens or (message.is_last and pull.is_prefix_fetch)):
            pull.first_tokens = message.first_tokens
            pull.num_cached = message.num_cached
            pull.has_last_announcement = True
            pull.last_announced_at = now
            if pull.state is PullState.READING:
                pull.num_known = pull.num_final_blocks(self._block_size)
            pull.num_exposed = self._num_unread(pull)
        return self._read_on(pull, now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """Extend the leases of `keys` by `lease_s`, counted from `sent_at`, when the consumer sent the renewal.

        A source renews only a lease that it has not ended in between, so its answer also covers the time before: a late
        answer of a source that was busy with a long step extends a lease that had run out on this side.
        """
        for key in keys:
            pull = self.find(key)
            if pull is not None:
                pull.lease_until = max(pull.lease_until or 0.0, sent_at + lease_s)

    # ---- events of the transport

    def read_done(self, read_id: int, now: float) -> list[PullOutcome]:
        """Record a read whose bytes have all arrived with matching digests."""
        read = self._reads.pop(read_id, None)
        if read is None:
            return []
        pull = read.pull
        self._end_read(pull, read_id, now)
        pull.progress_at = now
        pull.read_at = now
        pull.read(read.first_index, len(read.blocks))
        return [ReadEnded(read.blocks), *self._arrive(pull, now)]

    def read_failed(self, read_id: int, reason: str, *, drained: bool, now: float) -> list[PullOutcome]:
        """Give up the pull of a failed read. `drained`: the read cannot write any more; otherwise its blocks are
        quarantined."""
        read = self._reads.get(read_id)
        if read is None:
            return []
        outcomes: list[PullOutcome] = []
        if drained:
            del self._reads[read_id]
            self._end_read(read.pull, read_id, now)
            outcomes.append(ReadEnded(read.blocks))
        else:
            read.quarantined = True
        return outcomes + self.abandon(read.pull.job, ErrorKind.KV_LOST, reason, now)

    def peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[PullOutcome]:
        """Give up all pulls from a peer whose connection is lost. `proven`: none of its reads can still write."""
        outcomes: list[PullOutcome] = []
        self._torn.discard(source)
        for read_id, read in list(self._reads.items()):
            if read.pull.source != source:
                continue
            if proven:
                outcomes += self.read_failed(read_id, reason, drained=True, now=now)
            else:
                read.quarantined = True
        return outcomes + self.source_lost(source, reason, now)

    # ---- giving up

    def source_lost(self, source: WorkerRef, reason: str, now: float) -> list[PullOutcome]:
        """Give up all live pulls from `source`."""
        live = [p for p in self._pulls.values() if p.source == source and p.is_live]
        return [x for p in live for x in self.abandon(p.job, ErrorKind.KV_LOST, reason, now)]

    def abandon(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[PullOutcome]:
        """Give up the live pull of `job`; do nothing if it has ended."""
        pull = self._by_job.get(job)
        if pull is None or not pull.is_live:
            return []
        for read_id in pull.open_reads:
            self._reads[read_id].abandoned_at = now
        fetch_done = pull.prefix_fetch_done(now)
        stats = pull.stats(pull.num_ready, now)
        event = PullEvent.ABANDON_READING if pull.open_reads else PullEvent.ABANDON
        pull.state = next_pull(pull.state, event)
        self._forget(pull)
        return (
            [fetch_done] if pull.is_prefix_fetch else [PullFailed(pull.key, pull.job, pull.source, kind, reason, stats)]
        )

    def tick(self, now: float) -> list[PullOutcome]:
        """Enforce the deadlines of leases, of pulls without progress, and of abandoned reads that do not end."""
        outcomes: list[PullOutcome] = []
        for pull in [p for p in self._pulls.values() if p.is_live]:
            if pull.lease_until is not None and now - pull.lease_until >= pull.timeout_s:
                outcomes += self.abandon(pull.job, ErrorKind.KV_LOST, "the source does not renew the lease", now)
            elif now - pull.progress_at >= pull.timeout_s or now >= pull.ends_at:
                outcomes += self._overdue(pull, now)
            else:
                outcomes += self._arrive(pull, now)
        for read in self._reads.values():
            source = read.pull.source
            is_late = read.abandoned_at is not None and now - read.abandoned_at >= self._drain_timeout_s
            if is_late and not read.quarantined and source not in self._torn:
                self._torn.add(source)
                outcomes.append(TearDownProducer(source))
        for source in [x.source for x in outcomes if isinstance(x, TearDownProducer)]:
            outcomes += self.source_lost(source, "its transport was torn down", now)
        return outcomes

    def next_deadline(self) -> float:
        """Return the time before which `tick` does nothing unless an event arrives.

        The result is minus infinity if `tick` has work at once, and infinity if there is nothing to wait for.
        """
        due = math.inf
        for pull in self._pulls.values():
            if not pull.is_live:
                continue
            if pull.is_complete or pull.is_short:
                return -math.inf
            due = min(due, pull.due_at)
        for read in self._reads.values():
            if read.abandoned_at is not None and not read.quarantined and read.pull.source not in self._torn:
                due = min(due, read.abandoned_at + self._drain_timeout_s)
        return due

    # ---- accounting

    @property
    def num_quarantined(self) -> int:
        """Count the blocks whose reads are not proven to have ended."""
        return sum(len(r.blocks) for r in self._reads.values() if r.quarantined)

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def blocks(self) -> Iterator[BlockId]:
        """Iterate over every block once per read that holds it, for the pool's `check`."""
        return (b for read in self._reads.values() for b in read.blocks)

    def live(self) -> Iterator[Pull]:
        return (p for p in self._pulls.values() if p.is_live)

    def __len__(self) -> int:
        return len(self._pulls)

    # ---- internals

    def _overdue(self, pull: Pull, now: float) -> list[PullOutcome]:
        """Give up a pull without progress for its timeout, unless the source is still computing under a lease that it
        renews."""
        waited = f"for {pull.timeout_s:g} s"
        if pull.open_reads or pull.is_prefix_fetch:
            return self.abandon(pull.job, ErrorKind.KV_LOST, f"no KV arrived {waited}", now)
        if pull.state is PullState.WAITING and pull.was_announced:
            return self.abandon(pull.job, ErrorKind.OVERLOADED, f"no room for the KV {waited}", now)
        if pull.lease_until is None:
            return self.abandon(pull.job, ErrorKind.KV_LOST, f"the source did not answer {waited}", now)
        return []

    def _read_on(self, pull: Pull, now: float) -> list[PullOutcome]:
        """Start a read of all blocks that are offered, writable and not being read; do nothing before blocks were
        granted."""
        if pull.state is not PullState.READING:
            return []
        first, stop = pull.next_index, pull.num_readable
        if stop <= first:
            return self._arrive(pull, now)
        offered, local = pull.offered_in(first, stop), pull.blocks[first:stop]
        self._num_reads += 1
        read_id = self._num_reads
        self._reads[read_id] = _InflightRead(pull, first, local)
        if not pull.open_reads:
            pull.busy_since = now
            pull.progress_at = now
        pull.open_reads.add(read_id)
        pull.next_index = stop
        return [StartRead(read_id, pull.source, first, offered, local), *self._request_remainder(pull)]

    def _arrive(self, pull: Pull, now: float) -> list[PullOutcome]:
        """Complete a pull that has all its blocks, once a renewal proves that the lease outlived the last read."""
        if pull.is_short:
            return self.abandon(pull.job, ErrorKind.KV_LOST, "the source offered too few blocks", now)
        if not pull.is_complete:
            return self._request_remainder(pull)
        pull.state = next_pull(pull.state, PullEvent.ARRIVED)
        self._forget(pull)
        if pull.is_prefix_fetch:
            return [pull.prefix_fetch_done(now)]
        stats = pull.stats(pull.num_known, now)
        return [
            KVComplete(pull.key, pull.job, pull.source, pull.first_tokens, pull.num_computed, pull.num_cached, stats)
        ]

    def _request_remainder(self, pull: Pull) -> list[PullOutcome]:
        """Request the remainder of a migrating sequence once at most one complete block is still to arrive."""
        if pull.state is not PullState.READING or not pull.is_open_ended or pull.remainder_requested:
            return []
        num_complete = pull.num_computed // self._block_size
        if num_complete - pull.next_index + self._num_reading(pull) > 1:
            return []
        pull.remainder_requested = True
        return [RequestRemainder(pull.key, pull.job, pull.source)]

    def _end_read(self, pull: Pull, read_id: int, now: float) -> None:
        pull.open_reads.discard(read_id)
        if pull.open_reads:
            return
        pull.busy_s += now - pull.busy_since
        if pull.state is PullState.DRAINING:
            pull.state = next_pull(pull.state, PullEvent.DRAINED)

    def _num_unread(self, pull: Pull) -> int:
        """Count the blocks that have not arrived; before blocks were granted, all that the source offers."""
        if pull.state is PullState.WAITING:
            return pull.num_offered - pull.first_index
        return self._num_reading(pull) + max(0, pull.num_readable - pull.next_index)

    def _num_reading(self, pull: Pull) -> int:
        return sum(len(self._reads[r].blocks) for r in pull.open_reads)

    def _add(self, pull: Pull) -> None:
        is_new = pull.key not in self._pulls and pull.job not in self._by_job
        assert is_new, f"{pull.key} is being pulled, or {pull.job} pulls already"
        self._pulls[pull.key] = pull
        self._by_job[pull.job] = pull

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.key], self._by_job[pull.job]
