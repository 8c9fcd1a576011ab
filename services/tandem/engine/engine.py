"""One worker's step: scheduler, leases and pulls joined into begin and finish; never does I/O or reads a clock.

Whatever comes in (jobs, messages of peers, results, time) is a method; whatever is to be done comes out as effects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, KVFact, PromptLogprobs, TokenRun
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.core.worker_load import DrainResult, EngineStats, WorkerLoad
from tandem.engine.effects import Effect, SendEvent
from tandem.engine.engine_stats import check_blocks, engine_stats, load
from tandem.engine.job_completion import JobCompletion
from tandem.engine.job_events import tokens
from tandem.engine.job_table import JobTable
from tandem.engine.job_timeline import JobTimeline
from tandem.engine.kv_consumer import KVConsumer
from tandem.engine.kv_producer import KVProducer
from tandem.engine.migration import DrainMigration
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import Announcement, RemotePrefixRequest
from tandem.kv.kv_consumer import PullTable
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.phases.decode_run import DecodeRun
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLimits:
    """Seconds; see `HandoffConfig`. `block_bytes` only turns blocks into bytes in reports."""

    lease_s: float = 10.0
    pull_timeout_s: float = 30.0
    drain_timeout_s: float = 10.0
    block_bytes: int = 0


class Engine:
    """All of one worker that decides. `begin` and `finish` alternate, with up to `plan_depth` plans open.

    Since the start `num_preempted` sequences had to give their blocks up and `num_generated` tokens were drawn. Without
    `speculation` a step draws at most one token of a sequence.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        handoff: HandoffLimits,
        model_fingerprint: str,
        *,
        plan_depth: int = 1,
        speculation: Speculation | None = None,
    ) -> None:
        self._pool = pool
        self._scheduler = Scheduler(pool, limits, model_fingerprint, speculation)
        self._producer = KVProducer(pool, self._scheduler.prefix_server, handoff.lease_s)
        self._drain_migration = DrainMigration(self._scheduler.migrations, self._producer)
        self._jobs = JobTable()
        self._times = JobTimeline()
        self._completion = JobCompletion(self._scheduler, self._jobs, self._drain_migration, self._times)
        self._pulls = PullTable(
            pull_timeout_s=handoff.pull_timeout_s, drain_timeout_s=handoff.drain_timeout_s, block_size=pool.block_size
        )
        self._consumer = KVConsumer(
            self._pulls, pool, self._scheduler, self._jobs, self._completion, handoff.lease_s, handoff.block_bytes
        )
        self._plan_depth = plan_depth
        self.draining = False
        self.num_preempted = self.num_generated = 0

    # ---- jobs

    def submit(self, job: Job, now: float) -> list[Effect]:
        """Accept a job, or raise TandemError and keep nothing of it. The same job again is accepted and changes
        nothing; a newer attempt ends the older one, and choices that were cancelled before they came end at once."""
        met = self._jobs.examine(job)
        if met is None:
            return []
        fenced, forbidden = met
        if self.draining:
            raise TandemError(ErrorKind.DRAINING, "this worker takes no new work", retry_after_s=1.0)
        if isinstance(job, ResumeJob):
            self._consumer.check_free(job)
        self._jobs.forget(now)
        self._scheduler.add(job, now)
        effects = self._promise(job, now) if isinstance(job, PrefillJob) else []
        effects += [effect for older in fenced for effect in self.cancel(older, now)]
        self._jobs.add(job)
        self._times.accepted(job, now)
        effects += (
            self._consumer.open(job, now)
            if isinstance(job, ResumeJob)
            else self._consumer.fetch_remote_prefix(job, now)
        )
        return effects + [effect for key in forbidden for effect in self.cancel(key, now)]

    def cancel(self, key: JobKey, now: float) -> list[Effect]:
        """End one choice of a job, with the last one the job; what is not here is refused should it come."""
        job = self._jobs.find(key)
        if job is None:
            if not self._jobs.is_known(key):
                self._jobs.tombstone(key, now)
            return []
        return [*self._stop_choice(key, job, now, ErrorKind.CANCELLED, "cancelled"), SendEvent(Cancelled(key))]

    def start_drain(self, now: float) -> list[Effect]:
        """Take no new jobs, and let those that are here go on elsewhere: a sequence that runs is offered, and draws on
        until it is taken; what has no KV to offer, or is in the way, fails as DRAINING. Prefills end as ever."""
        self.draining = True
        self._drain_migration.begin()
        return self._evacuate(now)

    # ---- the step

    def begin(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        """Plan the next step; None when there is nothing to compute or enough plans are open."""
        if not self.may_begin:
            return None, []
        planned = self._scheduler.plan(now)
        self.num_preempted += planned.num_preempted
        self._times.planned(planned, now)
        effects: list[Effect] = []
        for offer in planned.offers:
            job = self._jobs.named(offer.key)
            assert isinstance(job, PrefillJob)
            self._producer.start(job, offer.blocks)
        for grant in planned.pulls:
            effects += self._consumer.granted(grant, now)
        is_stuck = not (planned.step or planned.pulls or self._scheduler.num_open_plans or self._pulls.num_reads)
        back = self._drain_migration.in_the_way() if is_stuck else ()
        return planned.step, effects + [x for key in back for x in self._give_back(key, now)]

    @property
    def may_begin(self) -> bool:
        """Fewer plans are open than may be."""
        return self._scheduler.num_open_plans < self._plan_depth

    def finish(self, result: StepResult, now: float) -> list[Effect]:
        """Take in what a plan yielded; plans finish in the order in which they began."""
        effects, times = list[Effect](), self._times
        times.finished(now)
        for progress in self._scheduler.commit(result):
            if progress.scores:
                name = (self._jobs.live_keys(progress.key) or [progress.key])[0]
                effects.append(SendEvent(PromptLogprobs(name, progress.first_scored, progress.scores)))
            for part in progress.parts:
                self.num_generated += len(part.tokens)
                effects += tokens(part, times.drew(part, now) if part.tokens and part.key in times.undrawn else None)
                effects += [] if part.has_ended else self._drain_migration.computed(part)
            if isinstance(progress.job, PrefillJob):
                effects += self._producer.offer(progress.job, progress, now)
            effects += self._completion.settle(progress, now)
        return [*effects, *self._producer.announce_served(now), *self._consumer.read_on(now)]

    def run(self, limit: int) -> DecodeRun | None:
        """What `begin` would plan next, as far as that is the same decodes over and over; changes nothing. Nobody draws
        the first token here in a run."""
        return None if self._times.undrawn else self._scheduler.run(limit)

    def finish_run(self, run: DecodeRun, drawn: Sequence[Sequence[int]]) -> list[TokenRun]:
        """Take in a run's first steps: as many tokens of each of its sequences, in its order. No sequence ends."""
        self.num_generated += sum(len(ids) for ids in drawn)
        return self._scheduler.commit_run(run, drawn)

    # ---- the producer's side of hand-offs

    def follow(
        self, key: HandoffKey, consumer: WorkerRef, now: float, prefix_request: RemotePrefixRequest | None = None
    ) -> list[Effect]:
        """A consumer wants a hand-off's announcements, from the first on; `prefix_request`: of cached blocks, to be
        lent now."""
        self._drain_migration.follow(key, now)
        return self._producer.follow(key, consumer, now, prefix_request)

    def renew(self, keys: Iterable[HandoffKey], consumer: WorkerRef, now: float) -> list[Effect]:
        """A consumer needs more time; `now` is the moment of the answer."""
        return self._producer.renew(keys, consumer, now)

    def take(self, key: HandoffKey, num_output_tokens: int) -> None:
        """The consumer of a sequence that moves has nearly all of its KV, and knows so many of its output tokens."""
        self._drain_migration.ask_rest(key, num_output_tokens)

    def release(self, key: HandoffKey, now: float, *, is_taken: bool = False) -> list[Effect]:
        """A consumer needs the KV no more; a prefill that is still running for it ends, and so does a sequence that its
        consumer goes on with."""
        if self._drain_migration.has(key):
            moved = self._drain_migration.released(key, now, is_taken=is_taken)
            return [] if moved is None else self._completion.settle(self._scheduler.release_migrated(moved), now)
        return self._cancel_all(self._producer.release(key, now), now)

    def revoke_lease(self, key: HandoffKey, now: float) -> list[Effect]:
        """A gateway needs the KV no more; a prefill that is still running for it ends. A consumer that may be reading
        says for itself when it has let go."""
        if self._drain_migration.recalled(key, now):
            return []
        name, effects = self._producer.revoke(key, now)
        return [*effects, *self._cancel_all(name, now)]

    # ---- the consumer's side

    def announced(self, message: Announcement, now: float) -> list[Effect]:
        """The source completed blocks. The token that it drew goes out at once; it never waits for the KV."""
        return self._consumer.announced(message, now)

    def handoff_ended(self, key: HandoffKey, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """The source ended a hand-off before it was taken. CANCELLED says that nothing is left to be taken."""
        pull = self._pulls.find(key)
        return [] if pull is None else self._consumer.abandon(pull.job, kind, message, now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """The source answered a StreamHandoff or Renew that was sent at `sent_at`."""
        self._pulls.renewed(keys, sent_at, lease_s)

    def read_done(self, read: int, now: float) -> list[Effect]:
        return self._consumer.apply(self._pulls.read_done(read, now), now)

    def read_failed(self, read: int, reason: str, *, drained: bool, now: float) -> list[Effect]:
        """Nothing follows where nobody waited for it any more, and only there."""
        return self._consumer.apply(self._pulls.read_failed(read, reason, drained=drained, now=now), now)

    def source_lost(self, source: WorkerRef, reason: str, now: float) -> list[Effect]:
        """A source cannot be reached at all; reads under way go on until the transport says otherwise."""
        return self._consumer.apply(self._pulls.source_lost(source, reason, now), now)

    def peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[Effect]:
        """The transport gave a peer up; `proven`: none of its reads can still write."""
        return self._consumer.apply(self._pulls.peer_lost(source, reason, proven=proven, now=now), now)

    def take_facts(self) -> list[KVFact]:
        """As `BlockPool.take_facts`."""
        return self._pool.take_events()

    def abandon(self, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """Nothing is computed any more and every live job fails; nothing else is to be done with the engine then."""
        return self._completion.abandon(self._jobs.keys(), now, kind, message)

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        """Enforce deadlines; to be called several times per second whether or not there is work."""
        lapsed, effects = self._producer.lapse(now)
        for ended in [ended for ended in lapsed if not self._drain_migration.lapsed(ended.key)]:
            job = None if ended.job is None else self._jobs.named(ended.job)
            if job is not None:
                effects += self._fail(job, ErrorKind.KV_LOST, "nobody renewed the lease of this prefill", now)
        effects += self._evacuate(now) + self._consumer.tick(now)
        self._jobs.forget(now)
        return effects

    def next_deadline(self) -> float:
        """Before it `tick` has nothing to do, if nothing comes. In the past: it is to look each time."""
        return (
            -math.inf
            if self._drain_migration.is_due
            else min(self._producer.next_expiry(), self._consumer.next_deadline())
        )

    # ---- books

    @property
    def pacer(self) -> StepSizer:
        """Drivers tell it how long steps took; the sizes of later steps follow from that."""
        return self._scheduler.pacer

    def drained(self) -> DrainResult:
        """How far an evacuation has come."""
        return DrainResult(self.num_live, self._drain_migration.num_moved, self._drain_migration.num_given_back)

    @property
    def is_idle(self) -> bool:
        """Nothing is running, offered or being read."""
        return not (len(self._jobs) or self._scheduler.num_sequences or len(self._producer) or self._pulls.num_reads)

    @property
    def num_live(self) -> int:
        """Jobs and leases that a drain waits for."""
        return len(self._jobs) + len(self._producer)

    @property
    def is_transferring(self) -> bool:
        """A lease or a read is open, so the transport must be polled often."""
        return len(self._producer) > 0 or len(self._pulls) > 0 or self._pulls.num_reads > 0

    def live_jobs(self) -> list[JobKey]:
        """Every choice that has not ended."""
        return self._jobs.keys()

    def load(self) -> WorkerLoad:
        return load(self._scheduler, self._pool, self.draining)

    def books(self) -> EngineStats:
        return engine_stats(self._pool, self._scheduler, self._producer, self._pulls)

    def check(self) -> None:
        """Re-add all books. Raises AssertionError naming what is off."""
        check_blocks(self._pool, self._scheduler, self._producer, self._pulls)
        self._drain_migration.check()
        self._times.check(job.key for job in self._jobs)
        keys = {job.key for job in self._jobs} | set(self._jobs.keys())
        self._producer.check(keys)
        self._consumer.check(keys)

    def __repr__(self) -> str:
        return f"<engine {len(self._jobs)} jobs, {len(self._producer)} leases, {self._scheduler!r}, {self._pool!r}>"

    # ---- inside

    def _stop(self, job: Job, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """End a job and its hand-offs without a word to its gateway."""
        effects = self._consumer.let_go(job, kind, reason, now)
        if isinstance(job, PrefillJob):
            effects += self._producer.withdraw(job.offer, kind, reason, now)
        return effects + self._completion.drop(self._jobs.live_keys(job.key), now, kind, reason)

    def _stop_choice(self, key: JobKey, job: Job, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """End one choice of a job, with the last one the job, without a word to its gateway."""
        is_last = self._jobs.live_keys(job.key) == [key]
        return self._stop(job, now, kind, reason) if is_last else self._completion.drop([key], now, kind, reason)

    def _evacuate(self, now: float) -> list[Effect]:
        """Offer what runs by now, and give back what waits."""
        back = (x for key in self._drain_migration.fruitless() for x in self._give_back(key, now))
        return [*back, *self._drain_migration.offer()]

    def _give_back(self, key: JobKey, now: float) -> list[Effect]:
        """Another worker is to compute this choice anew."""
        job, failed = self._jobs.find(key), Failed(key, ErrorKind.DRAINING, "this worker is about to stop")
        assert job is not None, f"{key} is here without a job"
        self._drain_migration.num_given_back += 1
        return [*self._stop_choice(key, job, now, failed.kind, failed.message), SendEvent(failed)]

    def _cancel_all(self, name: JobKey | None, now: float) -> list[Effect]:
        return [x for key in (self._jobs.live_keys(name) if name else ()) for x in self.cancel(key, now)]

    def _fail(self, job: Job, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        keys = self._jobs.live_keys(job.key)
        return [*self._stop(job, now, kind, message), *(SendEvent(Failed(key, kind, message)) for key in keys)]

    def _promise(self, job: PrefillJob, now: float) -> list[Effect]:
        """Open the lease of a job that the scheduler has taken; one whose hand-off it fences ends."""
        try:
            older, effects = self._producer.open_lease(job, now)
        except TandemError:
            for key in job.keys:
                self._scheduler.cancel(key)
            raise
        return [*effects, *self._cancel_all(older, now)]
