"""The consumer's side of every hand-off: what is being read from whom into which blocks; never reads a byte itself.

Decisions come out as values (`StartRead`, `RequestRemainder`, `KVComplete`, ...) for the holder of the book to
carry out. A read cannot be aborted, so blocks under one are given back only by `ReadEnded`: when the transport says
that it ended, or has proven that the peer as a whole is torn down. Times are seconds of the caller's clock.
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
    """One pull per job. Reads outlive their pulls until the transport is done with them. `block_size` in tokens."""

    def __init__(self, *, pull_timeout_s: float, drain_timeout_s: float, block_size: int = 1) -> None:
        self._block_size = block_size
        self._pull_timeout_s = pull_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._pulls: dict[HandoffKey, Pull] = {}
        self._by_job: dict[JobKey, Pull] = {}
        self._reads: dict[int, _InflightRead] = {}
        self._torn: set[WorkerRef] = set()
        self._num_reads = 0

    # ---- what the job and the source say

    def open(self, key: HandoffKey, job: JobKey, source: WorkerRef, now: float) -> None:
        """Wait for a source's announcements. A hand-off is pulled by one job at a time; the caller sees to it."""
        self._add(Pull(key, job, source, now, self._pull_timeout_s))

    def open_prefix_fetch(
        self, key: HandoffKey, job: JobKey, source: WorkerRef, prefix_fetch: PrefixFetchTerms, now: float
    ) -> None:
        """Wait for a cached prefix. It has its blocks here once they are `granted`."""
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
        """The job got its blocks: `[num_hits, num_known)` are to be read, as far as its source has not said better. Of
        all, the first `num_writable` (None: all) may be written by now."""
        pull = self._by_job[job]
        pull.state = next_pull(pull.state, PullEvent.GRANTED)
        pull.blocks, pull.num_hits = blocks, num_hits
        pull.num_writable = len(blocks) if num_writable is None else num_writable
        pull.num_ready = num_hits
        pull.num_known = pull.num_told(self._block_size) if pull.is_told else num_known
        pull.next_index = num_hits
        pull.moved_at = now
        return self._read_on(pull, now)

    def grown(self, job: JobKey, blocks: tuple[BlockId, ...], num_writable: int) -> None:
        """The job has these blocks now, of which it had the first already."""
        pull = self._by_job[job]
        assert blocks[: len(pull.blocks)] == pull.blocks, f"{pull!r} got other blocks"
        pull.blocks, pull.num_writable = blocks, num_writable

    def writable(self, job: JobKey, num_writable: int, now: float) -> list[PullOutcome]:
        """So many leading blocks may be written by now."""
        pull = self._by_job[job]
        pull.num_writable = num_writable
        return self._read_on(pull, now)

    def announced(self, message: Announcement, now: float) -> list[PullOutcome]:
        """Take in an announcement. What is known already is skipped; one that leaves a gap ends the pull."""
        pull = self.find(message.key)
        if pull is None:
            return []
        if message.first_index > pull.num_offered:
            return self.abandon(pull.job, ErrorKind.KV_LOST, "an announcement is missing", now)
        if not pull.was_announced:
            pull.was_announced = True
            pull.first_at = pull.moved_at = now
        elif message.first_index == 0:
            # All is told anew, on a new stream: what was asked on the old one may be lost.
            pull.has_asked = False
        elif pull.is_prefix_fetch:
            pull.moved_at = now
        pull.offered.extend(message.blocks[pull.num_offered - message.first_index :])
        pull.is_moving = message.is_moving
        pull.num_computed = max(pull.num_computed, message.num_computed)
        if not pull.is_told and (message.first_tokens or (message.is_last and pull.is_prefix_fetch)):
            pull.first_tokens, pull.num_cached = message.first_tokens, message.num_cached
            pull.is_told = True
            pull.last_at = now
            if pull.state is PullState.READING:
                pull.num_known = pull.num_told(self._block_size)
            pull.num_exposed = self._num_unread(pull)
        return self._read_on(pull, now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """The source granted `lease_s` more; the consumer counts them from when it asked.

        A source grants only what it has never ended, so its answer vouches for all the time before it too: a late one,
        of a source that was busy with a long step, makes up for a lease that had run out here.
        """
        for key in keys:
            pull = self.find(key)
            if pull is not None:
                pull.lease_until = max(pull.lease_until or 0.0, sent_at + lease_s)

    # ---- what the transport says

    def read_done(self, read_id: int, now: float) -> list[PullOutcome]:
        """All bytes of a read are here and their digests are right."""
        read = self._reads.pop(read_id, None)
        if read is None:
            return []
        pull = read.pull
        self._end_read(pull, read_id, now)
        pull.moved_at = pull.read_at = now
        pull.read(read.first_index, len(read.blocks))
        return [ReadEnded(read.blocks), *self._arrive(pull, now)]

    def read_failed(self, read_id: int, reason: str, *, drained: bool, now: float) -> list[PullOutcome]:
        """A read went wrong. `drained` says that nothing of it can still write."""
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
        """The connection to a peer is gone. `proven`: none of its reads can still write."""
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
        """End all live pulls from a source."""
        live = [p for p in self._pulls.values() if p.source == source and p.is_live]
        return [x for p in live for x in self.abandon(p.job, ErrorKind.KV_LOST, reason, now)]

    def abandon(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[PullOutcome]:
        """Give a live pull up; nothing happens to one that has ended."""
        pull = self._by_job.get(job)
        if pull is None or not pull.is_live:
            return []
        for read_id in pull.open_reads:
            self._reads[read_id].abandoned_at = now
        over = pull.prefix_fetch_over(now)
        stats = pull.stats(pull.num_ready, now)
        event = PullEvent.ABANDON_READING if pull.open_reads else PullEvent.ABANDON
        pull.state = next_pull(pull.state, event)
        self._forget(pull)
        return [over] if pull.is_prefix_fetch else [PullFailed(pull.key, pull.job, pull.source, kind, reason, stats)]

    def tick(self, now: float) -> list[PullOutcome]:
        """Enforce the deadlines: leases, pulls without progress, reads that do not end."""
        outcomes: list[PullOutcome] = []
        for pull in [p for p in self._pulls.values() if p.is_live]:
            if pull.lease_until is not None and now - pull.lease_until >= pull.timeout_s:
                outcomes += self.abandon(pull.job, ErrorKind.KV_LOST, "the source does not renew the lease", now)
            elif now - pull.moved_at >= pull.timeout_s or now >= pull.ends_at:
                outcomes += self._overdue(pull, now)
            else:
                outcomes += self._arrive(pull, now)
        for read in self._reads.values():
            source = read.pull.source
            late = read.abandoned_at is not None and now - read.abandoned_at >= self._drain_timeout_s
            if late and not read.quarantined and source not in self._torn:
                self._torn.add(source)
                outcomes.append(TearDownProducer(source))
        for source in [x.source for x in outcomes if isinstance(x, TearDownProducer)]:
            outcomes += self.source_lost(source, "its transport was torn down", now)
        return outcomes

    def next_deadline(self) -> float:
        """Before it `tick` does nothing, if nothing comes; a time that has passed where it is to look at once, and
        infinity where there is nothing to look at."""
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

    # ---- books

    @property
    def num_quarantined(self) -> int:
        """Blocks whose reads are not proven to have ended."""
        return sum(len(r.blocks) for r in self._reads.values() if r.quarantined)

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def blocks(self) -> Iterator[BlockId]:
        """Every block once per read that holds it; for the pool's check."""
        return (b for read in self._reads.values() for b in read.blocks)

    def live(self) -> Iterator[Pull]:
        return (p for p in self._pulls.values() if p.is_live)

    def __len__(self) -> int:
        return len(self._pulls)

    # ---- inside

    def _overdue(self, pull: Pull, now: float) -> list[PullOutcome]:
        """A pull that has not moved for the timeout. Waiting for the source to compute is not its fault: then the
        lease, which the source renews, says whether to go on."""
        waited = f"for {pull.timeout_s:g} s"
        if pull.open_reads or pull.is_prefix_fetch:
            return self.abandon(pull.job, ErrorKind.KV_LOST, f"no KV arrived {waited}", now)
        if pull.state is PullState.WAITING and pull.was_announced:
            return self.abandon(pull.job, ErrorKind.OVERLOADED, f"no room for the KV {waited}", now)
        if pull.lease_until is None:
            return self.abandon(pull.job, ErrorKind.KV_LOST, f"the source did not answer {waited}", now)
        return []

    def _read_on(self, pull: Pull, now: float) -> list[PullOutcome]:
        """Read all that is offered and not being read; nothing before there is room."""
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
            pull.busy_since = pull.moved_at = now
        pull.open_reads.add(read_id)
        pull.next_index = stop
        return [StartRead(read_id, pull.source, first, offered, local), *self._ask(pull)]

    def _arrive(self, pull: Pull, now: float) -> list[PullOutcome]:
        """Conclude a pull that has all it needs, the source's word included that the lease outlived the last read."""
        if pull.is_short:
            return self.abandon(pull.job, ErrorKind.KV_LOST, "the source offered too few blocks", now)
        if not pull.is_complete:
            return self._ask(pull)
        pull.state = next_pull(pull.state, PullEvent.ARRIVED)
        self._forget(pull)
        if pull.is_prefix_fetch:
            return [pull.prefix_fetch_over(now)]
        stats = pull.stats(pull.num_known, now)
        return [
            KVComplete(pull.key, pull.job, pull.source, pull.first_tokens, pull.num_computed, pull.num_cached, stats)
        ]

    def _ask(self, pull: Pull) -> list[PullOutcome]:
        """Once at most one complete block of a sequence that moves is still to come, all that is left is little."""
        if pull.state is not PullState.READING or not pull.is_open_ended or pull.has_asked:
            return []
        num_complete = pull.num_computed // self._block_size
        if num_complete - pull.next_index + self._num_reading(pull) > 1:
            return []
        pull.has_asked = True
        return [RequestRemainder(pull.key, pull.job, pull.source)]

    def _end_read(self, pull: Pull, read_id: int, now: float) -> None:
        pull.open_reads.discard(read_id)
        if pull.open_reads:
            return
        pull.busy_s += now - pull.busy_since
        if pull.state is PullState.DRAINING:
            pull.state = next_pull(pull.state, PullEvent.DRAINED)

    def _num_unread(self, pull: Pull) -> int:
        """Blocks that are not here yet; before there is room, all that the source offers."""
        if pull.state is PullState.WAITING:
            return pull.num_offered - pull.first_index
        return self._num_reading(pull) + max(0, pull.num_readable - pull.next_index)

    def _num_reading(self, pull: Pull) -> int:
        return sum(len(self._reads[r].blocks) for r in pull.open_reads)

    def _add(self, pull: Pull) -> None:
        is_new = pull.key not in self._pulls and pull.job not in self._by_job
        assert is_new, f"{pull.key} is being pulled, or {pull.job} pulls already"
        self._pulls[pull.key] = self._by_job[pull.job] = pull

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.key], self._by_job[pull.job]
