"""Join the consumer's side of hand-offs with the jobs and blocks that the pulls are for."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.step_cost import StepCost
from tandem.engine.effects import Effect, FollowHandoff, ReleaseHandoff, RenewLeases, SendEvent, SendRemainderRequest
from tandem.engine.engine_stats import pull_times, pulled_event
from tandem.engine.job_completion import JobCompletion
from tandem.engine.job_events import first_tokens, pull_failure_event, validate_announcement
from tandem.engine.job_table import JobTable
from tandem.engine.job_timings import Outcome, PullEnd
from tandem.kv.block_pool import BlockPool, Holder
from tandem.kv.expiring_dict import ExpiringDict
from tandem.kv.handoff import Announcement, PullState, RemotePrefixRequest
from tandem.kv.kv_consumer import PullTable
from tandem.kv.pull import PrefixFetchTerms, Pull
from tandem.kv.pull_actions import (
    KVComplete,
    PrefixFetchDone,
    PullFailed,
    PullOutcome,
    PullStats,
    ReadEnded,
    RequestRemainder,
    StartRead,
    TearDownProducer,
)
from tandem.sched.scheduler import Scheduler
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


class KVConsumer:
    """Carry out the decisions of the pull table `pulls`. Leases are renewed three times in `lease_s` seconds."""

    def __init__(
        self,
        pulls: PullTable,
        pool: BlockPool,
        scheduler: Scheduler,
        jobs: JobTable,
        completion: JobCompletion,
        lease_s: float,
        block_bytes: int,
    ) -> None:
        self.pulls = pulls
        self._pool = pool
        self._scheduler = scheduler
        self._jobs = jobs
        self._completion = completion
        self._renewal_s = lease_s / 3
        self._block_bytes = block_bytes
        # Late messages of a fetch that is over must not be taken for messages of another fetch with the same key.
        self._past_fetches: ExpiringDict[HandoffKey, None] = ExpiringDict(PREFIX_FETCH_MEMORY_S)
        self._next_renewal = 0.0

    def check_free(self, job: ResumeJob) -> None:
        """Raise TandemError when another job pulls the hand-off of `job`."""
        if self.pulls.find(job.offer) is not None:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"another job pulls {job.offer} already")

    def open(self, job: ResumeJob, now: float) -> list[Effect]:
        """Follow the hand-off that an accepted Resume pulls."""
        self._schedule_renewal(now)
        self.pulls.open(job.offer, job.key, job.source, now)
        return [FollowHandoff(job.source, job.offer)]

    def fetch_remote_prefix(self, job: GenerateJob | PrefillJob, now: float) -> list[Effect]:
        """Request the remote prefix of an accepted job, which waits for it; skip a prefix that does not help or does
        not fit."""
        if job.prefix is None:
            return []
        key, remote_prefixes = HandoffKey(job.prefix.handoff, job.attempt), self._scheduler.remote_prefixes
        self._past_fetches.forget(now)
        if key in self._past_fetches or self.pulls.find(key) is not None:
            remote_prefixes.skip(job.key)
            return []
        prefix_request = remote_prefixes.begin(job.key)
        if prefix_request is None:
            return []
        self._schedule_renewal(now)
        self._past_fetches.put(key, None, now)
        prefix_fetch = prefix_fetch_terms(prefix_request, self._pool.block_size, self._scheduler.pacer.model.published)
        self.pulls.open_prefix_fetch(key, job.key, job.prefix.source, prefix_fetch, now)
        return [FollowHandoff(job.prefix.source, key, prefix_request), *self.read_on(now)]

    def read_on(self, now: float) -> list[Effect]:
        """Start reads into blocks that may be written now: blocks of remote prefix fetches, and blocks by which a pull
        has grown."""
        effects: list[Effect] = []
        for pull in list(self.pulls.live()):
            if pull.state is PullState.READING and pull.num_writable < len(pull.blocks):
                num_writable = self._num_writable(pull.blocks, pull.num_writable)
                effects += self.apply(self.pulls.writable(pull.job, num_writable, now), now)
            elif pull.state is PullState.WAITING and pull.is_prefix_fetch:
                blocks = self._scheduler.remote_prefixes.blocks(pull.job)
                if blocks is not None:
                    outcomes = self.pulls.granted(pull.job, blocks, pull.first_index, len(blocks), now)
                    effects += self.apply(outcomes, now)
        return effects

    def granted(self, grant: PullAllocated, now: float) -> list[Effect]:
        """Start the pull of a job that got its blocks. A migrating sequence may have grown beyond them, then more are
        allocated."""
        pull = self.pulls.of_job(grant.key)
        assert pull is not None, f"{grant.key} got blocks without a pull"
        blocks = self._grow_blocks(pull, grant.blocks, len(pull.offered) + pull.is_open_ended)
        if blocks is None:
            return self._fail_without_room(pull, now)
        num_writable = self._num_writable(blocks, len(grant.blocks))
        outcomes = self.pulls.granted(
            grant.key, blocks, grant.num_hit_blocks, grant.num_known_blocks, now, num_writable=num_writable
        )
        return self.apply(outcomes, now)

    def announced(self, message: Announcement, now: float) -> list[Effect]:
        """Apply an announcement: send new first tokens to the gateway at once, and read the announced blocks."""
        pull = self.pulls.find(message.key)
        if pull is None:
            return []
        if pull.is_prefix_fetch:
            return self.apply(self.pulls.announced(message, now), now)
        job = self._jobs.find_job(pull.job)
        assert isinstance(job, ResumeJob)
        reason = validate_announcement(job, message)
        if reason is not None:
            return self.abandon(pull.job, ErrorKind.KV_LOST, reason, now)
        if pull.state is PullState.READING:
            num_offered = message.first_index + len(message.blocks)
            blocks = self._grow_blocks(pull, pull.blocks, num_offered + (not message.first_tokens))
            if blocks is None:
                return self._fail_without_room(pull, now)
            self.pulls.grown(pull.job, blocks, self._num_writable(blocks, pull.num_writable))
        keys = self._jobs.live_keys(job.key)
        self._scheduler.on_producer_ready(keys[0])
        effects = first_tokens(job, keys, message) if not pull.first_tokens else []
        return effects + self.apply(self.pulls.announced(message, now), now)

    def abandon(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """Give up a pull and fail its job."""
        return self.apply(self.pulls.abandon(job, kind, reason, now), now)

    def drop_pull(self, job: Job, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """Give up the pull, if there is one, of a job that ends for another reason."""
        pull = self.pulls.of_job(job.key)
        if pull is None:
            return []
        self._record_pull(pull.job, pull.source, pull.stats(pull.num_ready, now), now, _outcome(kind))
        self.pulls.abandon(job.key, kind, reason, now)
        if pull.is_prefix_fetch:
            self._scheduler.remote_prefixes.end(job.key, pull.first_index)
        return [ReleaseHandoff(pull.source, pull.key)]

    def tick(self, now: float) -> list[Effect]:
        """Enforce deadlines, and renew leases in time."""
        effects = self.apply(self.pulls.tick(now), now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._renewal_s
            effects += _renewals(self.pulls.live())
        return effects

    def next_deadline(self) -> float:
        """Return the time before which `tick` has nothing to do unless an event arrives."""
        return min(self.pulls.next_deadline(), self._next_renewal) if len(self.pulls) else self.pulls.next_deadline()

    def apply(self, outcomes: Sequence[PullOutcome], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for outcome in outcomes:
            match outcome:
                case StartRead():
                    self._pool.retain(outcome.local, Holder.READ)
                    effects.append(outcome)
                case ReadEnded():
                    self._pool.drop(outcome.blocks, Holder.READ)
                case RequestRemainder():
                    job = self._jobs.find_job(outcome.job)
                    assert job is not None, f"{outcome.job} pulls without a job"
                    effects.append(SendRemainderRequest(outcome.source, outcome.key, len(job.output_tokens)))
                case KVComplete():
                    effects += self._complete_pull(outcome, now)
                case PullFailed():
                    effects += self._fail_pull(outcome, now)
                case PrefixFetchDone():
                    effects += self._finish_prefix_fetch(outcome, now)
                case TearDownProducer():
                    effects.append(outcome)
        return effects

    def check(self, jobs: Container[JobKey]) -> None:
        """Raise AssertionError naming the first inconsistency. `jobs`: the job keys and choice keys of all live
        jobs."""
        for pull in self.pulls.live():
            assert pull.job in jobs, f"{pull!r} has no job"
            assert pull.is_prefix_fetch == (pull.job in self._scheduler.remote_prefixes), f"{pull!r}: prefix fetches"

    # ---- internals

    def _grow_blocks(self, pull: Pull, blocks: tuple[BlockId, ...], num_needed: int) -> tuple[BlockId, ...] | None:
        """Return at least `num_needed` blocks for the pull of a migrating sequence, allocating what is missing; None
        without room.

        Other pulls do not grow and keep their blocks.
        """
        if not pull.is_migrating or num_needed <= len(blocks):
            return blocks
        return self._scheduler.migrations.make_room(pull.job, num_needed)

    def _num_writable(self, blocks: Sequence[BlockId], num_before: int) -> int:
        """Count the leading blocks before the first fresh one whose old content is still to be copied to host
        memory."""
        fresh = range(num_before, len(blocks))
        return next((index for index in fresh if self._pool.is_copied(blocks[index : index + 1])), len(blocks))

    def _fail_without_room(self, pull: Pull, now: float) -> list[Effect]:
        """Fail a pull as OVERLOADED, so that the gateway chooses another worker."""
        return self.abandon(
            pull.job, ErrorKind.OVERLOADED, "no room for the blocks that the sequence fills while it migrates", now
        )

    def _schedule_renewal(self, now: float) -> None:
        """Schedule the next lease renewal if the pull that is about to open is the only one."""
        if not len(self.pulls):
            self._next_renewal = max(self._next_renewal, now + self._renewal_s)

    def _finish_prefix_fetch(self, done: PrefixFetchDone, now: float) -> list[Effect]:
        """Let the job of a remote prefix fetch start with the blocks that have arrived, however the fetch ended."""
        self._scheduler.remote_prefixes.end(done.job, done.num_ready)
        self._record_pull(done.job, done.source, done.stats, now, "done" if done.stats.num_blocks else "failed")
        release = ReleaseHandoff(done.source, done.key)
        if not done.stats.num_blocks:
            return [release]
        key = self._jobs.live_keys(done.job)[0]
        pulled = pulled_event(key, done.stats, self._pool.block_size, self._block_bytes, done.source)
        return [release, SendEvent(pulled)]

    def _complete_pull(self, complete: KVComplete, now: float) -> list[Effect]:
        facts = (complete.first_tokens, complete.num_cached, complete.num_computed)
        self._record_pull(complete.job, complete.source, complete.stats, now, "done")
        progress = self._scheduler.kv_arrived(complete.job, *facts)
        pulled = pulled_event(progress.parts[0].key, complete.stats, self._pool.block_size, self._block_bytes)
        release = ReleaseHandoff(complete.source, complete.key, is_taken=True)
        return [release, SendEvent(pulled), *self._completion.settle(progress, now)]

    def _fail_pull(self, failed: PullFailed, now: float) -> list[Effect]:
        job = self._jobs.find_job(failed.job)
        assert job is not None, f"{failed.job} pulled without a job"
        keys = self._jobs.live_keys(job.key)
        self._record_pull(failed.job, failed.source, failed.stats, now, _outcome(failed.kind))
        # CANCELLED: nothing is left to hand over, so the job has done its part, see `pull_failure_event`.
        outcome: Outcome | None = "finished" if failed.kind is ErrorKind.CANCELLED else None
        effects = self._completion.drop(keys, now, failed.kind, failed.message, outcome)
        return [
            ReleaseHandoff(failed.source, failed.key),
            *effects,
            *(SendEvent(pull_failure_event(key, job, failed)) for key in keys),
        ]

    def _record_pull(self, job: JobKey, source: WorkerRef, stats: PullStats, now: float, outcome: PullEnd) -> None:
        """Record the times of a pull that is over."""
        pulling_job = self._jobs.find_job(job)
        assert pulling_job is not None, f"{job} pulled without a job"
        times = pull_times(pulling_job, source, stats, now, self._block_bytes, outcome)
        self._completion.times.pulled(job, times, stats.num_hit_blocks * self._pool.block_size)


def _outcome(kind: ErrorKind) -> PullEnd:
    return "cancelled" if kind is ErrorKind.CANCELLED else "failed"


def prefix_fetch_terms(prefix_request: RemotePrefixRequest, block_size: int, cost: StepCost | None) -> PrefixFetchTerms:
    """Return the time limits of a remote prefix fetch. `cost` is None while the compute time cannot be predicted."""
    if cost is None:
        return PrefixFetchTerms(prefix_request.first_index, MAX_PREFIX_FETCH_S, math.inf)
    first, stop = prefix_request.first_index * block_size, len(prefix_request.hashes) * block_size
    compute_s = max(MIN_PREFIX_FETCH_S, cost.chunk_s(first, stop - first))
    return PrefixFetchTerms(
        prefix_request.first_index, min(MAX_PREFIX_FETCH_S, compute_s), PREFIX_FETCH_FACTOR * compute_s
    )


def _renewals(pulls: Iterable[Pull]) -> list[Effect]:
    """Return one RenewLeases per source for all that is pulled from it."""
    keys: dict[WorkerRef, list[HandoffKey]] = {}
    for pull in pulls:
        keys.setdefault(pull.source, []).append(pull.key)
    return [RenewLeases(source, tuple(source_keys)) for source, source_keys in keys.items()]
