"""The taker's side of every hand-off: what is being read from whom into which blocks; never reads a byte itself.

Decisions come out as values (`StartRead`, `AskRest`, `Arrived`, ...) for the holder of the book to
carry out. A read cannot be aborted, so blocks under one are given back only by `ReadEnded`: when the transport says
that it ended, or has proven that the peer as a whole is torn down. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import Announcement, BlockDigest, PullEvent, PullState, next_pull
from tandem.kv.pull import Pull


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read the offered blocks, which stand at `[first_index, ...)` of the prompt, into `local`."""

    read: int
    source: WorkerRef
    first_index: int
    offered: tuple[BlockDigest, ...]
    local: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PullStats:
    """`num_hit_blocks` were found here, `num_blocks` were read, `num_exposed_blocks` of which when the last
    announcement had come; seconds are from the first and the last announcement to the last checked block, and those in
    which at least one read was under way."""

    num_hit_blocks: int
    num_blocks: int
    num_exposed_blocks: int
    total_s: float
    exposed_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class AskRest:
    """Nearly all KV of a sequence that moves is here: its source may draw its last token and hand over the rest."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef


@dataclass(frozen=True, slots=True)
class Arrived:
    """All KV of a job is here and checked within the lease: that of `num_computed` tokens. `first_tokens`,
    `num_cached`: as `Announcement`."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    first_tokens: tuple[SampledToken, ...]
    num_computed: int
    num_cached: int
    stats: PullStats


@dataclass(frozen=True, slots=True)
class Lost:
    """A pull was given up."""

    key: HandoffKey
    job: JobKey
    source: WorkerRef
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Nothing writes into these blocks any more."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Teardown:
    """A read does not end: give up the peer as a whole."""

    source: WorkerRef


PullOutcome = StartRead | AskRest | Arrived | Lost | ReadEnded | Teardown


@dataclass(slots=True)
class _Read:
    pull: Pull
    blocks: tuple[BlockId, ...]
    abandoned_at: float | None = None
    quarantined: bool = False


class PullBook:
    """One pull per job. Reads outlive their pulls until the transport is done with them. `block_size` in tokens."""

    def __init__(self, *, pull_timeout_s: float, drain_timeout_s: float, block_size: int = 1) -> None:
        self._block_size = block_size
        self._pull_timeout_s = pull_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._pulls: dict[HandoffKey, Pull] = {}
        self._by_job: dict[JobKey, Pull] = {}
        self._reads: dict[int, _Read] = {}
        self._torn: set[WorkerRef] = set()
        self._num_reads = 0

    # ---- what the job and the source say

    def open(self, key: HandoffKey, job: JobKey, source: WorkerRef, now: float) -> None:
        """Wait for a source's announcements. A hand-off is pulled by one job at a time; the caller sees to it."""
        assert key not in self._pulls and job not in self._by_job, f"{key} is being pulled, or {job} pulls already"
        self._pulls[key] = self._by_job[job] = Pull(key, job, source, now)

    def find(self, key: HandoffKey) -> Pull | None:
        pull = self._pulls.get(key)
        return pull if pull is not None and pull.is_live else None

    def of_job(self, job: JobKey) -> Pull | None:
        return self._by_job.get(job)

    def granted(
        self, job: JobKey, blocks: tuple[BlockId, ...], num_hits: int, num_known: int, now: float
    ) -> list[PullOutcome]:
        """The job got its blocks: `[num_hits, num_known)` are to be read, as far as its source has not said better."""
        pull = self._by_job[job]
        pull.state = next_pull(pull.state, PullEvent.GRANTED)
        pull.blocks, pull.num_hits = blocks, num_hits
        pull.num_known = max(num_hits, self._num_blocks(pull)) if pull.first_tokens else num_known
        pull.next_index = num_hits
        pull.moved_at = now
        return self._read_on(pull, now)

    def grown(self, job: JobKey, blocks: tuple[BlockId, ...]) -> None:
        """The job has these blocks now, of which it had the first already."""
        pull = self._by_job[job]
        assert blocks[: len(pull.blocks)] == pull.blocks, f"{pull!r} got other blocks"
        pull.blocks = blocks

    def announced(self, message: Announcement, now: float) -> list[PullOutcome]:
        """Take in an announcement. What is known already is skipped; one that leaves a gap ends the pull."""
        pull = self.find(message.key)
        if pull is None:
            return []
        if message.first_index > len(pull.offered):
            return self.abandon(pull.job, ErrorKind.KV_LOST, "an announcement is missing", now)
        if not pull.was_announced:
            pull.was_announced = True
            pull.first_at = pull.moved_at = now
        elif message.first_index == 0:
            # All is told anew, on a new stream: what was asked on the old one may be lost.
            pull.has_asked = False
        pull.offered.extend(message.blocks[len(pull.offered) - message.first_index :])
        pull.is_moving = message.is_moving
        pull.num_computed = max(pull.num_computed, message.num_computed)
        if message.first_tokens and not pull.first_tokens:
            pull.first_tokens, pull.num_cached = message.first_tokens, message.num_cached
            pull.last_at = now
            if pull.state is PullState.READING:
                pull.num_known = max(pull.num_hits, self._num_blocks(pull))
            pull.num_exposed = self._num_unread(pull)
        return self._read_on(pull, now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """The source granted `lease_s` more; the taker counts them from when it asked.

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
        event = PullEvent.ABANDON_READING if pull.open_reads else PullEvent.ABANDON
        pull.state = next_pull(pull.state, event)
        self._forget(pull)
        return [Lost(pull.key, pull.job, pull.source, kind, reason)]

    def tick(self, now: float) -> list[PullOutcome]:
        """Enforce the deadlines: leases, pulls without progress, reads that do not end."""
        outcomes: list[PullOutcome] = []
        for pull in [p for p in self._pulls.values() if p.is_live]:
            if pull.lease_until is not None and now - pull.lease_until >= self._pull_timeout_s:
                outcomes += self.abandon(pull.job, ErrorKind.KV_LOST, "the source does not renew the lease", now)
            elif now - pull.moved_at >= self._pull_timeout_s:
                outcomes += self._overdue(pull, now)
            else:
                outcomes += self._arrive(pull, now)
        for read in self._reads.values():
            source = read.pull.source
            late = read.abandoned_at is not None and now - read.abandoned_at >= self._drain_timeout_s
            if late and not read.quarantined and source not in self._torn:
                self._torn.add(source)
                outcomes.append(Teardown(source))
        for source in [x.source for x in outcomes if isinstance(x, Teardown)]:
            outcomes += self.source_lost(source, "its transport was torn down", now)
        return outcomes

    def next_deadline(self) -> float:
        """Before it `tick` does nothing, if nothing comes; a time that has passed where it is to look at once, and
        infinity where there is nothing to look at."""
        due = math.inf
        for pull in self._pulls.values():
            if not pull.is_live:
                continue
            if self._is_complete(pull) or self._is_short(pull):
                return -math.inf
            since = pull.moved_at if pull.lease_until is None else min(pull.moved_at, pull.lease_until)
            due = min(due, since + self._pull_timeout_s)
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
        waited = f"for {self._pull_timeout_s:g} s"
        if pull.open_reads:
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
        first, stop = pull.next_index, self._num_readable(pull)
        if stop <= first:
            return self._arrive(pull, now)
        offered, local = tuple(pull.offered[first:stop]), pull.blocks[first:stop]
        self._num_reads += 1
        read_id = self._num_reads
        self._reads[read_id] = _Read(pull, local)
        if not pull.open_reads:
            pull.busy_since = pull.moved_at = now
        pull.open_reads.add(read_id)
        pull.next_index = stop
        return [StartRead(read_id, pull.source, first, offered, local), *self._ask(pull)]

    def _arrive(self, pull: Pull, now: float) -> list[PullOutcome]:
        """Conclude a pull that has all it needs, the source's word included that the lease outlived the last read."""
        if self._is_short(pull):
            return self.abandon(pull.job, ErrorKind.KV_LOST, "the source offered too few blocks", now)
        if not self._is_complete(pull):
            return self._ask(pull)
        pull.state = next_pull(pull.state, PullEvent.ARRIVED)
        self._forget(pull)
        num_read = pull.num_known - pull.num_hits
        times = (now - pull.first_at, now - pull.last_at, pull.busy_s)
        stats = PullStats(pull.num_hits, num_read, pull.num_exposed, *times)
        return [Arrived(pull.key, pull.job, pull.source, pull.first_tokens, pull.num_computed, pull.num_cached, stats)]

    def _ask(self, pull: Pull) -> list[PullOutcome]:
        """Once at most one complete block of a sequence that moves is still to come, all that is left is little."""
        if pull.state is not PullState.READING or not pull.is_open_ended or pull.has_asked:
            return []
        num_complete = pull.num_computed // self._block_size
        if num_complete - pull.next_index + self._num_reading(pull) > 1:
            return []
        pull.has_asked = True
        return [AskRest(pull.key, pull.job, pull.source)]

    def _is_short(self, pull: Pull) -> bool:
        """The source has said its last word, and offered less than there is to read."""
        is_over = pull.state is PullState.READING and pull.first_tokens
        return bool(is_over) and len(pull.offered) < pull.num_known

    def _is_complete(self, pull: Pull) -> bool:
        if pull.state is not PullState.READING or not pull.first_tokens:
            return False
        if pull.next_index < pull.num_known or pull.open_reads:
            return False
        return pull.lease_until is not None and pull.read_at < pull.lease_until

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
            return len(pull.offered)
        return self._num_reading(pull) + max(0, self._num_readable(pull) - pull.next_index)

    def _num_reading(self, pull: Pull) -> int:
        return sum(len(self._reads[r].blocks) for r in pull.open_reads)

    def _num_readable(self, pull: Pull) -> int:
        """Leading blocks that are offered and have a place here."""
        num_wanted = len(pull.blocks) if pull.is_open_ended else pull.num_known
        return min(len(pull.offered), num_wanted)

    def _num_blocks(self, pull: Pull) -> int:
        """Those of all tokens whose KV is offered, once the source has said its last word."""
        return -(-pull.num_computed // self._block_size)

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.key], self._by_job[pull.job]
