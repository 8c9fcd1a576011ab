"""Read the KV of hand-offs from other workers: which blocks are read from which worker into which local blocks.

A read cannot be aborted, so the pool holds the blocks under a read until the transport reports that the read ended, or
has proven that the connection to the peer is torn down as a whole. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockHash, BlockId, HandoffKey, JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.step_cost import StepCost
from tandem.engine.effects import (
    ConsumerEffect,
    Effect,
    FollowHandoff,
    PullEnded,
    ReleaseHandoff,
    RenewLeases,
    SendRemainderRequest,
    StartRead,
    TearDownPeer,
)
from tandem.engine.job_events import first_tokens, validate_announcement
from tandem.engine.job_timeline import PullOutcome, PullTimes
from tandem.engine.pull import Pull
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.expiring_dict import ExpiringDict
from tandem.kv.handoff import Announcement, PullEvent, PullState, RemotePrefixRequest, next_pull
from tandem.sched.state.limits import BlockDemand
from tandem.sched.state.schedule_result import PullAllocated

MIN_PREFIX_FETCH_S, MAX_PREFIX_FETCH_S = 0.2, 2.0
"""Bounds of the time without progress after which a remote prefix fetch is given up. Between them the limit is the time
that computing the tokens takes: after that, waiting has cost as much as computing. The lower bound is the time to
connect to a source, the upper one the longest acceptable delay of a first token."""
PREFIX_FETCH_MEMORY_S = 120.0
"""Seconds for which the key of a remote prefix fetch is not used again; as long as ended jobs are remembered."""
PREFIX_FETCH_FACTOR = 2.0
"""Limit of a whole remote prefix fetch, as a multiple of the predicted compute time: other work on this worker would
make computing slower than predicted."""


@dataclass(slots=True)
class _InflightRead:
    pull: Pull
    first_index: int
    blocks: tuple[BlockId, ...]
    abandoned_at: float | None = None
    quarantined: bool = False


class KVConsumer:
    """Read KV blocks from other workers for the jobs of this worker: follow hand-offs, start reads, renew leases, and
    report the end of each pull once with `PullEnded`.

    It owns one open pull per job, the reads in flight (some of them of pulls that are over), and the blocks that
    receive remote prefixes. `limits`: lease time and timeouts; leases are renewed three times in `limits.lease_s`
    seconds. `block_bytes`: size of a KV block, used only in reports. `num_prefix_tokens`: tokens whose KV was fetched
    as remote prefixes since the start.

    A job holds no blocks and keeps no other job from starting while its remote prefix is fetched: the blocks belong to
    a table of the fetch, which is published and released before the job may start. The job then shares the blocks like
    any cached prefix; if they were evicted in between, it computes the prefix. A fetch cannot deadlock: it begins only
    when each running sequence can grow by a block and every reserved pull still finds its blocks. All blocks that the
    fetch needs here are allocated at the beginning, its source serves what is already cached there, and both ends have
    deadlines.
    """

    def __init__(self, pool: BlockPool, limits: HandoffConfig, block_bytes: int = 0) -> None:
        self.num_prefix_tokens = 0
        self._pool = pool
        self._renewal_s = limits.lease_s / 3
        self._pull_timeout_s = limits.pull_timeout_s
        self._drain_timeout_s = limits.drain_timeout_s
        self._block_bytes = block_bytes
        self._pulls: dict[HandoffKey, Pull] = {}
        self._by_job: dict[JobKey, Pull] = {}
        self._reads: dict[int, _InflightRead] = {}
        self._torn: set[WorkerRef] = set()
        self._num_reads = 0
        # Late messages of a fetch that is over must not be taken for messages of another fetch with the same key.
        self._past_fetches: ExpiringDict[HandoffKey, None] = ExpiringDict(PREFIX_FETCH_MEMORY_S)
        self._next_renewal = 0.0

    # ---- jobs

    def check_free(self, job: ResumeJob) -> None:
        """Raise TandemError (INVALID_REQUEST) when the hand-off of `job` is being pulled by another job."""
        if job.offer in self._pulls:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"another job pulls {job.offer} already")

    def on_resume(self, job: ResumeJob, now: float) -> list[Effect]:
        """Open the pull of an accepted `ResumeJob` and follow its hand-off; `on_blocks` later gives it local blocks to
        read into."""
        self._add(Pull(job.offer, job, job.source, now, self._pull_timeout_s), now)
        return [FollowHandoff(job.source, job.offer)]

    def on_remote_prefix(
        self,
        job: GenerateJob | PrefillJob,
        hashes: Sequence[BlockHash],
        demand: BlockDemand,
        cost: StepCost | None,
        now: float,
    ) -> list[ConsumerEffect] | None:
        """Request the remote prefix of an accepted job and return the effects; return None, without a change, if the
        prefix is not to be fetched.

        - `hashes`: the block hashes of the prefix.
        - `demand`: free blocks that must remain for other sequences; without that room the prefix is not fetched.
        - `cost`: predicts how long computing the prefix would take, from which the time limits of the fetch follow;
          None if not known yet.

        A prefix whose hand-off key was used before is not fetched again.
        """
        assert job.prefix is not None, f"{job.key} has no remote prefix"
        key, source = HandoffKey(job.prefix.handoff, job.attempt), job.prefix.source
        self._past_fetches.forget(now)
        # Blocks that are only in host memory are fetched as well: bringing them back would need a plan.
        num_hits = len(self._pool.cached(hashes))
        num_taken = self._pool.num_free_needed(hashes[:num_hits], len(hashes))
        has_room = num_taken + demand.num_running + demand.num_reserved <= self._pool.num_free
        if key in self._past_fetches or key in self._pulls or not has_room:
            return None
        self._past_fetches.put(key, None, now)
        timeout_s, limit_s = prefix_fetch_limits(num_hits, len(hashes), self._pool.block_size, cost)
        timeout_s = min(timeout_s, self._pull_timeout_s)
        pull = Pull(key, job, source, now, timeout_s, ends_at=now + limit_s, first_index=num_hits, hashes=hashes)
        self._add(pull, now)
        self._pool.share(pull.table, hashes[:num_hits])
        grown = self._pool.grow(pull.table, len(hashes))
        assert grown, "room was counted"
        return [
            FollowHandoff(source, key, RemotePrefixRequest(num_hits, tuple(hashes))),
            *self._grant(pull, num_hits, len(hashes), now),
        ]

    def on_blocks(self, grant: PullAllocated, now: float) -> list[ConsumerEffect]:
        """Record the local blocks that the scheduler allocated for the pull of a `ResumeJob`, and start reading into
        them.

        If a migrating sequence has grown beyond these blocks, more are allocated. If too few blocks are free for that,
        the pull fails as OVERLOADED.
        """
        pull = self._by_job[grant.key]
        pull.table = grant.table
        if not self._make_room(pull, len(pull.offered) + pull.is_open_ended):
            return self._fail_without_room(pull, now)
        return self._grant(pull, grant.num_hit_blocks, grant.num_known_blocks, now)

    def drop(self, job: Job, kind: ErrorKind, reason: str, now: float) -> list[ConsumerEffect]:
        """Give up the open pull of a job that ends before its pull, and return the effects, which release the hand-off
        at its source and report the end of the pull; none if the job has no open pull.

        `kind` and `reason`: why the job ends. Reads in flight go on until the transport reports their end.
        """
        pull = self._by_job.get(job.key)
        return [] if pull is None else self._give_up(pull, kind, reason, now)

    # ---- messages of sources

    def on_announcement(self, message: Announcement, keys: Sequence[JobKey], now: float) -> list[ConsumerEffect]:
        """Record an announcement, return token events for new first tokens, and start reads of the new blocks.

        Blocks that were announced before are skipped; if an announcement is missing, the pull is given up. `keys`: the
        choices of the pulling job that have not ended.
        """
        pull = self._pulls.get(message.key)
        if pull is None:
            return []
        effects: list[ConsumerEffect] = []
        if isinstance(pull.job, ResumeJob):
            reason = validate_announcement(pull.job, message)
            if reason is not None:
                return self._give_up(pull, ErrorKind.KV_LOST, reason, now)
            if pull.state is PullState.READING:
                num_offered = message.first_index + len(message.blocks)
                if not self._make_room(pull, num_offered + (not message.first_tokens)):
                    return self._fail_without_room(pull, now)
                self._update_blocks(pull)
            effects += first_tokens(pull.job, keys, message) if not pull.first_tokens else []
        if message.first_index > pull.num_offered:
            return effects + self._give_up(pull, ErrorKind.KV_LOST, "an announcement is missing", now)
        self._record_announcement(pull, message, now)
        return effects + self._read_on(pull, now)

    def on_handoff_ended(self, key: HandoffKey, kind: ErrorKind, message: str, now: float) -> list[ConsumerEffect]:
        """Give up the pull of a hand-off that its source has ended; `kind` and `message` are the source's reason.

        CANCELLED: the source has nothing left to hand over. Returns no effects for an unknown key.
        """
        pull = self._pulls.get(key)
        return [] if pull is None else self._give_up(pull, kind, message, now)

    def on_renewed(self, keys: Iterable[HandoffKey], sent_at: float, lease_s: float) -> None:
        """Extend the leases of `keys` to `lease_s` seconds after `sent_at`, the time at which this worker sent the
        renewal.

        A source renews only leases that are still open, so its answer proves that they were open all the time before:
        even an answer that arrives after a lease has run out on this side extends the lease. Unknown keys are ignored.
        """
        for key in keys:
            pull = self._pulls.get(key)
            if pull is not None:
                pull.lease_until = max(pull.lease_until or 0.0, sent_at + lease_s)

    def on_source_lost(self, source: WorkerRef, reason: str, now: float) -> list[ConsumerEffect]:
        """Give up all pulls from `source`; reads in flight go on until the transport reports their end."""
        live = [pull for pull in self._pulls.values() if pull.source == source]
        return [x for pull in live for x in self._give_up(pull, ErrorKind.KV_LOST, reason, now)]

    # ---- events of the transport

    def on_read_done(self, read_id: int, now: float) -> list[ConsumerEffect]:
        """Record that all blocks of a read arrived with matching digests, and complete the pull if this was its last
        read.

        An unknown read is ignored.
        """
        read = self._reads.get(read_id)
        if read is None:
            return []
        pull = read.pull
        self._end_read(read_id, now)
        pull.progress_at = now
        pull.read_at = now
        pull.read(read.first_index, len(read.blocks))
        return self._arrive(pull, now)

    def on_read_failed(self, read_id: int, reason: str, *, drained: bool, now: float) -> list[ConsumerEffect]:
        """Give up the pull of a failed read; return no effects if the pull is over or the read unknown.

        `drained`: the read cannot write any more, and its local blocks are free. Otherwise its blocks are quarantined:
        they are held, and not used, until `on_peer_lost` is called with `proven`.
        """
        read = self._reads.get(read_id)
        if read is None:
            return []
        if drained:
            self._end_read(read_id, now)
        else:
            read.quarantined = True
        return self._give_up(read.pull, ErrorKind.KV_LOST, reason, now)

    def on_peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[ConsumerEffect]:
        """Give up all pulls from the worker `source`, to which the transport has lost its connection.

        `proven`: no read from it can still write, so the local blocks of these reads are free. Otherwise these blocks
        are quarantined.
        """
        effects: list[ConsumerEffect] = []
        self._torn.discard(source)
        for read_id, read in list(self._reads.items()):
            if read.pull.source != source:
                continue
            if proven:
                effects += self.on_read_failed(read_id, reason, drained=True, now=now)
            else:
                read.quarantined = True
        return effects + self.on_source_lost(source, reason, now)

    # ---- time and books

    def read_on(self, now: float) -> list[ConsumerEffect]:
        """Start the reads that had to wait because the old content of their local blocks was still to be copied to host
        memory, as far as these copies are finished."""
        effects: list[ConsumerEffect] = []
        for pull in [pull for pull in self._pulls.values() if pull.num_writable < len(pull.blocks)]:
            self._update_blocks(pull)
            effects += self._read_on(pull, now)
        return effects

    def on_tick(self, now: float) -> list[ConsumerEffect]:
        """Give up pulls that are overdue, disconnect sources whose abandoned reads do not end, and renew leases when
        due."""
        effects: list[ConsumerEffect] = []
        for pull in list(self._pulls.values()):
            if pull.is_complete:
                effects += self._arrive(pull, now)
            elif pull.lease_until is not None and now - pull.lease_until >= pull.timeout_s:
                effects += self._give_up(pull, ErrorKind.KV_LOST, "the source does not renew the lease", now)
            elif now - pull.progress_at >= pull.timeout_s or now >= pull.ends_at:
                effects += self._overdue(pull, now)
            else:
                effects += self._arrive(pull, now)
        late: list[WorkerRef] = []
        for read in self._reads.values():
            source = read.pull.source
            is_late = read.abandoned_at is not None and now - read.abandoned_at >= self._drain_timeout_s
            if is_late and not read.quarantined and source not in self._torn:
                self._torn.add(source)
                late.append(source)
        for source in late:
            effects.append(TearDownPeer(source, "a read does not end"))
            effects += self.on_source_lost(source, "its transport was torn down", now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._renewal_s
            effects += self._renewals()
        return effects

    def next_deadline(self) -> float:
        """Return the time before which `on_tick` does nothing unless an event arrives.

        Minus infinity: `on_tick` has work now. Infinity: there is nothing to wait for.
        """
        due = self._next_renewal if self._pulls else math.inf
        for pull in self._pulls.values():
            if pull.is_complete or pull.is_short:
                return -math.inf
            due = min(due, pull.due_at)
        for read in self._reads.values():
            if read.abandoned_at is not None and not read.quarantined and read.pull.source not in self._torn:
                due = min(due, read.abandoned_at + self._drain_timeout_s)
        return due

    @property
    def num_quarantined(self) -> int:
        """Count the local blocks that are held because their failed reads may still write."""
        return sum(len(r.blocks) for r in self._reads.values() if r.quarantined)

    @property
    def num_reads(self) -> int:
        """Count the reads in flight, abandoned and quarantined ones included."""
        return len(self._reads)

    def find(self, key: HandoffKey) -> Pull | None:
        """Return the open pull of a hand-off; None where there is none."""
        return self._pulls.get(key)

    def blocks(self) -> Iterator[BlockId]:
        """Iterate over the local blocks of all reads, each once per read that holds it, for `BlockPool.check`."""
        return (b for read in self._reads.values() for b in read.blocks)

    def prefix_tables(self) -> Iterator[BlockTable]:
        """Iterate over the block tables of remote prefixes that are being fetched, for `BlockPool.check`."""
        return (pull.table for pull in self._pulls.values() if pull.is_prefix_fetch)

    def check(self, jobs: Container[JobKey]) -> None:
        """Raise AssertionError naming the first inconsistency of pulls and reads. `jobs`: the keys of all live jobs."""
        assert list(self._pulls.values()) == list(self._by_job.values()), "pulls by hand-off and by job differ"
        for pull in self._pulls.values():
            assert pull.job.key in jobs, f"{pull!r} has no job"
            assert pull.state in (PullState.WAITING, PullState.READING), f"{pull!r} is over"
            assert pull.blocks == pull.table.ids() or pull.state is PullState.WAITING, f"{pull!r}: blocks"
        for read_id, read in self._reads.items():
            assert read_id in read.pull.open_reads, f"{read.pull!r} does not know its read {read_id}"
        num_open = sum(len(pull.open_reads) for pull in {id(r.pull): r.pull for r in self._reads.values()}.values())
        assert num_open == len(self._reads), "a pull names a read that has ended"

    def __iter__(self) -> Iterator[Pull]:
        return iter(self._pulls.values())

    def __len__(self) -> int:
        return len(self._pulls)

    def __repr__(self) -> str:
        return f"<{len(self._pulls)} pulls, {len(self._reads)} reads, {self.num_prefix_tokens} prefix tokens read>"

    # ---- internals

    def _add(self, pull: Pull, now: float) -> None:
        is_new = pull.key not in self._pulls and pull.job.key not in self._by_job
        assert is_new, f"{pull.key} is being pulled, or {pull.job.key} pulls already"
        if not self._pulls:
            self._next_renewal = max(self._next_renewal, now + self._renewal_s)
        self._pulls[pull.key] = pull
        self._by_job[pull.job.key] = pull

    def _grant(self, pull: Pull, num_hits: int, num_known: int, now: float) -> list[ConsumerEffect]:
        """Start reading into the table of a pull. Blocks `[num_hits, num_known)` are to be read, unless the source has
        already announced another number."""
        pull.state = next_pull(pull.state, PullEvent.GRANTED)
        pull.num_writable = num_hits
        self._update_blocks(pull)
        pull.num_hits = num_hits
        pull.num_ready = num_hits
        pull.num_known = pull.num_final_blocks(self._pool.block_size) if pull.has_last_announcement else num_known
        pull.next_index = num_hits
        pull.progress_at = now
        return self._read_on(pull, now)

    def _record_announcement(self, pull: Pull, message: Announcement, now: float) -> None:
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
        if not pull.has_last_announcement and (message.first_tokens or message.is_last):
            pull.first_tokens = message.first_tokens
            pull.num_cached = message.num_cached
            pull.has_last_announcement = True
            pull.last_announced_at = now
            if pull.state is PullState.READING:
                pull.num_known = pull.num_final_blocks(self._pool.block_size)
            pull.num_exposed = self._num_unread(pull)

    def _make_room(self, pull: Pull, num_blocks: int) -> bool:
        """Extend the table of a migrating sequence to `num_blocks` blocks, more than were reserved; return False when
        there are too few. Other pulls do not grow."""
        return not pull.is_migrating or self._pool.grow(pull.table, num_blocks)

    def _update_blocks(self, pull: Pull) -> None:
        """Update the blocks of a pull from its table, and the number of leading ones that may be written: those before
        the first one whose old content is still to be copied to host memory. A remote prefix waits for all of them."""
        pull.blocks = pull.table.ids()
        if not self._pool.is_copied(pull.blocks[pull.num_writable :]):
            pull.num_writable = len(pull.blocks)
        elif not pull.is_prefix_fetch:
            while not self._pool.is_copied(pull.blocks[pull.num_writable : pull.num_writable + 1]):
                pull.num_writable += 1

    def _fail_without_room(self, pull: Pull, now: float) -> list[ConsumerEffect]:
        """Fail a pull as OVERLOADED, so that the gateway chooses another worker."""
        reason = "no room for the blocks that the sequence fills while it migrates"
        return self._give_up(pull, ErrorKind.OVERLOADED, reason, now)

    def _overdue(self, pull: Pull, now: float) -> list[ConsumerEffect]:
        """Give up a pull without progress for its timeout, unless the source is still computing under a lease that it
        renews."""
        waited = f"for {pull.timeout_s:g} s"
        if pull.open_reads or pull.is_prefix_fetch:
            return self._give_up(pull, ErrorKind.KV_LOST, f"no KV arrived {waited}", now)
        if pull.state is PullState.WAITING and pull.was_announced:
            return self._give_up(pull, ErrorKind.OVERLOADED, f"no room for the KV {waited}", now)
        if pull.lease_until is None:
            return self._give_up(pull, ErrorKind.KV_LOST, f"the source did not answer {waited}", now)
        return []

    def _read_on(self, pull: Pull, now: float) -> list[ConsumerEffect]:
        """Start a read of all blocks that are offered, writable and not being read; do nothing before blocks were
        granted."""
        if pull.state is not PullState.READING:
            return []
        first, stop = pull.next_index, pull.num_readable
        if stop <= first:
            return self._arrive(pull, now)
        offered = tuple(pull.offered[first - pull.first_index : stop - pull.first_index])
        local = pull.blocks[first:stop]
        self._num_reads += 1
        read_id = self._num_reads
        self._reads[read_id] = _InflightRead(pull, first, local)
        self._pool.retain(local, Holder.READ)
        if not pull.open_reads:
            pull.busy_since = now
            pull.progress_at = now
        pull.open_reads.add(read_id)
        pull.next_index = stop
        read = StartRead(read_id, pull.source, tuple(range(first, stop)), offered, local)
        return [read, *self._request_remainder(pull)]

    def _arrive(self, pull: Pull, now: float) -> list[ConsumerEffect]:
        """Complete a pull that has all its blocks, once a renewal proves that the lease outlived the last read."""
        if pull.is_short:
            return self._give_up(pull, ErrorKind.KV_LOST, "the source offered too few blocks", now)
        if not pull.is_complete:
            return self._request_remainder(pull)
        if pull.is_prefix_fetch:
            return self._finish_fetch(pull, PullEvent.ARRIVED, "failed", now)
        self._close(pull, PullEvent.ARRIVED)
        times = self._times(pull, "done", pull.num_known, now)
        ended = PullEnded(pull.job, times, None, "", pull.first_tokens, pull.num_computed, pull.num_cached)
        return [ReleaseHandoff(pull.source, pull.key, is_taken=True), ended]

    def _give_up(self, pull: Pull, kind: ErrorKind, reason: str, now: float) -> list[ConsumerEffect]:
        """Give up a pull; do nothing if it is over."""
        if self._pulls.get(pull.key) is not pull:
            return []
        for read_id in pull.open_reads:
            self._reads[read_id].abandoned_at = now
        event = PullEvent.ABANDON_READING if pull.open_reads else PullEvent.ABANDON
        outcome: PullOutcome = "cancelled" if kind is ErrorKind.CANCELLED else "failed"
        if pull.is_prefix_fetch:
            return self._finish_fetch(pull, event, outcome, now)
        self._close(pull, event)
        times = self._times(pull, outcome, pull.num_ready, now)
        return [ReleaseHandoff(pull.source, pull.key), PullEnded(pull.job, times, kind, reason)]

    def _finish_fetch(
        self, pull: Pull, event: PullEvent, without_blocks: PullOutcome, now: float
    ) -> list[ConsumerEffect]:
        """Publish the blocks of a remote prefix that have arrived, however the fetch ends; blocks that may have been
        read after the lease do not count. `without_blocks`: outcome of a fetch of which no block arrived."""
        self._close(pull, event)
        num_ready = pull.num_ready if pull.is_leased else pull.num_hits
        self._pool.publish(pull.table, pull.hashes[:num_ready])
        self._pool.release(pull.table)
        num_blocks = num_ready - pull.num_hits
        self.num_prefix_tokens += num_blocks * self._pool.block_size
        times = self._times(pull, "done" if num_blocks else without_blocks, num_ready, now)
        return [ReleaseHandoff(pull.source, pull.key), PullEnded(pull.job, times)]

    def _close(self, pull: Pull, event: PullEvent) -> None:
        pull.state = next_pull(pull.state, event)
        del self._pulls[pull.key], self._by_job[pull.job.key]

    def _times(self, pull: Pull, outcome: PullOutcome, num_local: int, now: float) -> PullTimes:
        return pull.times(outcome, num_local, now, self._pool.block_size, self._block_bytes)

    def _request_remainder(self, pull: Pull) -> list[ConsumerEffect]:
        """Request the remainder of a migrating sequence once at most one complete block is still to arrive."""
        if pull.state is not PullState.READING or not pull.is_open_ended or pull.remainder_requested:
            return []
        num_complete = pull.num_computed // self._pool.block_size
        if num_complete - pull.next_index + self._num_reading(pull) > 1:
            return []
        pull.remainder_requested = True
        return [SendRemainderRequest(pull.source, pull.key, len(pull.job.output_tokens))]

    def _end_read(self, read_id: int, now: float) -> None:
        """Release the blocks of a read that writes no more."""
        read = self._reads.pop(read_id)
        self._pool.drop(read.blocks, Holder.READ)
        pull = read.pull
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

    def _renewals(self) -> list[ConsumerEffect]:
        """Return one RenewLeases per source for all that is pulled from it."""
        keys: dict[WorkerRef, list[HandoffKey]] = {}
        for pull in self._pulls.values():
            keys.setdefault(pull.source, []).append(pull.key)
        return [RenewLeases(source, tuple(source_keys)) for source, source_keys in keys.items()]


def prefix_fetch_limits(num_hits: int, num_blocks: int, block_size: int, cost: StepCost | None) -> tuple[float, float]:
    """Return the two time limits of a remote prefix fetch in seconds: the longest time without progress, and the
    longest duration of the whole fetch.

    The blocks `[num_hits, num_blocks)` are fetched, of `block_size` tokens each. `cost` predicts how long computing
    them would take; while it is None (not known yet), the duration of the whole fetch is unlimited (infinity).
    """
    if cost is None:
        return MAX_PREFIX_FETCH_S, math.inf
    compute_s = max(MIN_PREFIX_FETCH_S, cost.chunk_s(num_hits * block_size, (num_blocks - num_hits) * block_size))
    return min(MAX_PREFIX_FETCH_S, compute_s), PREFIX_FETCH_FACTOR * compute_s
