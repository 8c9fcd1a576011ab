"""The consumer's side of hand-offs: pulls joined with the jobs and the blocks that they are for; never plans a step."""

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
"""A prefix fetch is given up that shows no sign of itself for as long as computing its tokens takes: then waiting has
cost as much again. It gets no less than what connecting to a source takes, and no more than a first token can wait."""
PREFIX_FETCH_MEMORY_S = 120.0
"""No prefix fetch has the name of one that was asked for so long ago; as jobs are remembered."""
PREFIX_FETCH_FACTOR = 2.0
"""One that goes on may take so many times as long as computing: what runs here makes that slower than predicted."""


class KVConsumer:
    """Carries out what its `book` decides. `lease_s`: pulls renew three times as often."""

    def __init__(
        self,
        book: PullTable,
        pool: BlockPool,
        scheduler: Scheduler,
        jobs: JobTable,
        completion: JobCompletion,
        lease_s: float,
        block_bytes: int,
    ) -> None:
        self.book = book
        self._pool = pool
        self._scheduler = scheduler
        self._jobs = jobs
        self._completion = completion
        self._renewal_s = lease_s / 3
        self._block_bytes = block_bytes
        # What is said late of a prefix fetch that is over must not be taken for another one's.
        self._fetched: ExpiringDict[HandoffKey, None] = ExpiringDict(PREFIX_FETCH_MEMORY_S)
        self._next_renewal = 0.0

    def check_free(self, job: ResumeJob) -> None:
        """Raises TandemError when another job pulls what this one wants."""
        if self.book.find(job.offer) is not None:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"another job pulls {job.offer} already")

    def open(self, job: ResumeJob, now: float) -> list[Effect]:
        """Follow the offer of an accepted job."""
        self._open_book(now)
        self.book.open(job.offer, job.key, job.source, now)
        return [FollowHandoff(job.source, job.offer)]

    def fetch_remote_prefix(self, job: GenerateJob | PrefillJob, now: float) -> list[Effect]:
        """Ask for the prefix that an accepted job is to read from another worker's cache, if it can be of use and there
        is room for it; the job waits for it."""
        if job.prefix is None:
            return []
        key, remote_prefixes = HandoffKey(job.prefix.handoff, job.attempt), self._scheduler.remote_prefixes
        self._fetched.forget(now)
        if key in self._fetched or self.book.find(key) is not None:
            remote_prefixes.skip(job.key)
            return []
        wanted = remote_prefixes.begin(job.key)
        if wanted is None:
            return []
        self._open_book(now)
        self._fetched.put(key, None, now)
        prefix_fetch = prefix_fetch_terms(wanted, self._pool.block_size, self._scheduler.pacer.model.published)
        self.book.open_prefix_fetch(key, job.key, job.prefix.source, prefix_fetch, now)
        return [FollowHandoff(job.prefix.source, key, wanted), *self.read_on(now)]

    def read_on(self, now: float) -> list[Effect]:
        """Read into what may be written by now: the blocks of prefix fetches, and those that a pull has grown by."""
        effects: list[Effect] = []
        for pull in list(self.book.live()):
            if pull.state is PullState.READING and pull.num_writable < len(pull.blocks):
                num_writable = self._num_writable(pull.blocks, pull.num_writable)
                effects += self.apply(self.book.writable(pull.job, num_writable, now), now)
            elif pull.state is PullState.WAITING and pull.is_prefix_fetch:
                blocks = self._scheduler.remote_prefixes.blocks(pull.job)
                if blocks is not None:
                    outcomes = self.book.granted(pull.job, blocks, pull.first_index, len(blocks), now)
                    effects += self.apply(outcomes, now)
        return effects

    def granted(self, grant: PullAllocated, now: float) -> list[Effect]:
        """A job got its blocks. What moves may have grown beyond them."""
        pull = self.book.of_job(grant.key)
        assert pull is not None, f"{grant.key} got blocks without a pull"
        blocks = self._fit(pull, grant.blocks, len(pull.offered) + pull.is_open_ended)
        if blocks is None:
            return self._find_no_room(pull, now)
        num_writable = self._num_writable(blocks, len(grant.blocks))
        outcomes = self.book.granted(
            grant.key, blocks, grant.num_hit_blocks, grant.num_known_blocks, now, num_writable=num_writable
        )
        return self.apply(outcomes, now)

    def announced(self, message: Announcement, now: float) -> list[Effect]:
        """The source completed blocks. What it drew goes out at once; that never waits for the KV."""
        pull = self.book.find(message.key)
        if pull is None:
            return []
        if pull.is_prefix_fetch:
            return self.apply(self.book.announced(message, now), now)
        job = self._jobs.named(pull.job)
        assert isinstance(job, ResumeJob)
        reason = validate_announcement(job, message)
        if reason is not None:
            return self.abandon(pull.job, ErrorKind.KV_LOST, reason, now)
        if pull.state is PullState.READING:
            num_offered = message.first_index + len(message.blocks)
            blocks = self._fit(pull, pull.blocks, num_offered + (not message.first_tokens))
            if blocks is None:
                return self._find_no_room(pull, now)
            self.book.grown(pull.job, blocks, self._num_writable(blocks, pull.num_writable))
        keys = self._jobs.live_keys(job.key)
        self._scheduler.on_producer_ready(keys[0])
        effects = first_tokens(job, keys, message) if not pull.first_tokens else []
        return effects + self.apply(self.book.announced(message, now), now)

    def abandon(self, job: JobKey, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """Give a pull and its job up."""
        return self.apply(self.book.abandon(job, kind, reason, now), now)

    def let_go(self, job: Job, kind: ErrorKind, reason: str, now: float) -> list[Effect]:
        """Give the pull of a job up that ends for another reason, if it has one."""
        pull = self.book.of_job(job.key)
        if pull is None:
            return []
        self._note(pull.job, pull.source, pull.stats(pull.num_ready, now), now, _outcome(kind))
        self.book.abandon(job.key, kind, reason, now)
        if pull.is_prefix_fetch:
            self._scheduler.remote_prefixes.end(job.key, pull.first_index)
        return [ReleaseHandoff(pull.source, pull.key)]

    def tick(self, now: float) -> list[Effect]:
        """Enforce deadlines, and renew leases in time."""
        effects = self.apply(self.book.tick(now), now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._renewal_s
            effects += _renewals(self.book.live())
        return effects

    def next_deadline(self) -> float:
        """Before it `tick` has nothing to do, if nothing comes."""
        return min(self.book.next_deadline(), self._next_renewal) if len(self.book) else self.book.next_deadline()

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
                    job = self._jobs.named(outcome.job)
                    assert job is not None, f"{outcome.job} pulls without a job"
                    effects.append(SendRemainderRequest(outcome.source, outcome.key, len(job.output_tokens)))
                case KVComplete():
                    effects += self._take_in(outcome, now)
                case PullFailed():
                    effects += self._fail_pull(outcome, now)
                case PrefixFetchDone():
                    effects += self._finish_prefix_fetch(outcome, now)
                case TearDownProducer():
                    effects.append(outcome)
        return effects

    def check(self, jobs: Container[JobKey]) -> None:
        """`jobs`: those that are live, by all their names. Raises AssertionError naming what is off."""
        for pull in self.book.live():
            assert pull.job in jobs, f"{pull!r} has no job"
            assert pull.is_prefix_fetch == (pull.job in self._scheduler.remote_prefixes), f"{pull!r}: prefix fetches"

    # ---- inside

    def _fit(self, pull: Pull, blocks: tuple[BlockId, ...], num_needed: int) -> tuple[BlockId, ...] | None:
        """A pull's blocks, more of them where what moves has filled more, and the one that it fills; None without room.
        Nobody else's offer grows."""
        if not pull.is_migrating or num_needed <= len(blocks):
            return blocks
        return self._scheduler.migrations.make_room(pull.job, num_needed)

    def _num_writable(self, blocks: Sequence[BlockId], num_before: int) -> int:
        """Leading blocks of which none is still to be copied to host memory, as fresh ones may be."""
        fresh = range(num_before, len(blocks))
        return next((index for index in fresh if self._pool.is_copied(blocks[index : index + 1])), len(blocks))

    def _find_no_room(self, pull: Pull, now: float) -> list[Effect]:
        """Another worker may have it."""
        return self.abandon(pull.job, ErrorKind.OVERLOADED, "no room for what is drawn while it moves", now)

    def _open_book(self, now: float) -> None:
        """Another pull begins."""
        if not len(self.book):
            self._next_renewal = max(self._next_renewal, now + self._renewal_s)

    def _finish_prefix_fetch(self, over: PrefixFetchDone, now: float) -> list[Effect]:
        """Whatever became of a prefix fetch, its job may start with what is here."""
        self._scheduler.remote_prefixes.end(over.job, over.num_ready)
        self._note(over.job, over.source, over.stats, now, "done" if over.stats.num_blocks else "failed")
        unfollow = ReleaseHandoff(over.source, over.key)
        if not over.stats.num_blocks:
            return [unfollow]
        key = self._jobs.live_keys(over.job)[0]
        pulled = pulled_event(key, over.stats, self._pool.block_size, self._block_bytes, over.source)
        return [unfollow, SendEvent(pulled)]

    def _take_in(self, arrived: KVComplete, now: float) -> list[Effect]:
        facts = (arrived.first_tokens, arrived.num_cached, arrived.num_computed)
        self._note(arrived.job, arrived.source, arrived.stats, now, "done")
        progress = self._scheduler.kv_arrived(arrived.job, *facts)
        pulled = pulled_event(progress.parts[0].key, arrived.stats, self._pool.block_size, self._block_bytes)
        unfollow = ReleaseHandoff(arrived.source, arrived.key, is_taken=True)
        return [unfollow, SendEvent(pulled), *self._completion.settle(progress, now)]

    def _fail_pull(self, lost: PullFailed, now: float) -> list[Effect]:
        job = self._jobs.named(lost.job)
        assert job is not None, f"{lost.job} pulled without a job"
        keys = self._jobs.live_keys(job.key)
        self._note(lost.job, lost.source, lost.stats, now, _outcome(lost.kind))
        # As `pull_failure_event` says it: where nothing is left to be taken, the job has done its part.
        outcome: Outcome | None = "finished" if lost.kind is ErrorKind.CANCELLED else None
        effects = self._completion.drop(keys, now, lost.kind, lost.message, outcome)
        return [
            ReleaseHandoff(lost.source, lost.key),
            *effects,
            *(SendEvent(pull_failure_event(key, job, lost)) for key in keys),
        ]

    def _note(self, job: JobKey, source: WorkerRef, stats: PullStats, now: float, outcome: PullEnd) -> None:
        """A pull is over."""
        named = self._jobs.named(job)
        assert named is not None, f"{job} pulled without a job"
        times = pull_times(named, source, stats, now, self._block_bytes, outcome)
        self._completion.times.pulled(job, times, stats.num_hit_blocks * self._pool.block_size)


def _outcome(kind: ErrorKind) -> PullEnd:
    return "cancelled" if kind is ErrorKind.CANCELLED else "failed"


def prefix_fetch_terms(wanted: RemotePrefixRequest, block_size: int, cost: StepCost | None) -> PrefixFetchTerms:
    """With its deadlines. `cost` None: nobody knows how long computing takes."""
    if cost is None:
        return PrefixFetchTerms(wanted.first_index, MAX_PREFIX_FETCH_S, math.inf)
    first, stop = wanted.first_index * block_size, len(wanted.hashes) * block_size
    compute_s = max(MIN_PREFIX_FETCH_S, cost.chunk_s(first, stop - first))
    return PrefixFetchTerms(wanted.first_index, min(MAX_PREFIX_FETCH_S, compute_s), PREFIX_FETCH_FACTOR * compute_s)


def _renewals(pulls: Iterable[Pull]) -> list[Effect]:
    """One Renew per source, for all that is pulled from it."""
    keys: dict[WorkerRef, list[HandoffKey]] = {}
    for pull in pulls:
        keys.setdefault(pull.source, []).append(pull.key)
    return [RenewLeases(source, tuple(mine)) for source, mine in keys.items()]
