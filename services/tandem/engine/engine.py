"""Plan and conclude the steps of one worker: scheduler, leases and pulls joined behind `begin` and `finish`.

Every input (jobs, messages of peers, results, time) is a method call; everything that is to be done is returned as an
effect. The engine does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, KVFact, PromptLogprobs, TokenRun
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.worker_load import DrainResult, EngineStats, WorkerLoad
from tandem.engine.effects import ConsumerEffect, Effect, JobEnded, PullEnded
from tandem.engine.job_events import ending, kv_received, pull_failure_event, tokens
from tandem.engine.job_table import JobTable
from tandem.engine.job_timeline import EndedChoice, JobTimeline, Outcome, dropped_choice, ended_choice
from tandem.engine.kv_consumer import KVConsumer
from tandem.engine.kv_producer import KVProducer
from tandem.engine.migration import DrainMigration
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.handoff import Announcement, RemotePrefixRequest
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.phases.decode_run import DecodeRun
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.step_plan import StepPlan, StepResult


class Engine:
    """Own all decisions of one worker. `begin` and `finish` alternate, with up to `plan_depth` plans open.

    Counted since the start: `num_preempted` sequences that lost their blocks, `num_generated` sampled tokens. Without
    `speculation` a step samples at most one token of a sequence. `block_bytes` only converts blocks to bytes in
    reports.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        handoff: HandoffConfig,
        model_fingerprint: str,
        *,
        block_bytes: int = 0,
        plan_depth: int = 1,
        speculation: Speculation | None = None,
    ) -> None:
        self._pool = pool
        self._scheduler = Scheduler(pool, limits, model_fingerprint, speculation)
        self._producer = KVProducer(pool, handoff.lease_s)
        self._consumer = KVConsumer(pool, handoff, block_bytes)
        self._drain_migration = DrainMigration(self._scheduler.state, self._producer)
        self._jobs = JobTable()
        self._times = JobTimeline()
        self._plan_depth = plan_depth
        self.draining = False
        self.num_preempted = 0
        self.num_generated = 0

    # ---- jobs

    def submit(self, job: Job, now: float) -> list[Effect]:
        """Accept a job, or raise TandemError and keep nothing of it.

        A job that is submitted again changes nothing. A newer attempt ends the older one, and choices that were
        cancelled before the job arrived end at once.
        """
        conflicts = self._jobs.examine(job)
        if conflicts is None:
            return []
        fenced, tombstoned = conflicts
        if self.draining:
            raise TandemError(ErrorKind.DRAINING, "this worker takes no new work", retry_after_s=1.0)
        if isinstance(job, ResumeJob):
            self._consumer.check_free(job)
        self._jobs.forget(now)
        self._scheduler.add(job, now)
        effects = self._open_lease(job, now) if isinstance(job, PrefillJob) else []
        effects += [effect for older in fenced for effect in self.cancel(older, now)]
        self._jobs.add(job)
        self._times.accepted(job, now)
        effects += (
            self._consumer.on_resume(job, now) if isinstance(job, ResumeJob) else self._fetch_remote_prefix(job, now)
        )
        return effects + [effect for key in tombstoned for effect in self.cancel(key, now)]

    def cancel(self, key: JobKey, now: float) -> list[Effect]:
        """End one choice of a job, and the job with its last choice. An unknown choice is rejected if it arrives
        later."""
        job = self._jobs.find(key)
        if job is None:
            if not self._jobs.is_known(key):
                self._jobs.tombstone(key, now)
            return []
        return [*self._stop_choice(key, job, now, ErrorKind.CANCELLED, "cancelled"), Cancelled(key)]

    def start_drain(self, now: float) -> list[Effect]:
        """Reject new jobs from now on, and migrate or requeue the jobs that are here.

        A running sequence is offered to other workers and keeps sampling until one takes it over. A job without KV to
        offer, or whose blocks the others need, fails as DRAINING. Prefills end as usual.
        """
        self.draining = True
        self._drain_migration.has_begun = True
        return self._migrate_or_requeue(now)

    # ---- the step

    def begin(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        """Plan the next step; the plan is None when there is nothing to compute or enough plans are open."""
        if not self.may_begin:
            return None, []
        planned = self._scheduler.plan(now, self._producer.blocks_to_digest())
        self.num_preempted += planned.num_preempted
        self._times.planned(planned, now)
        effects: list[Effect] = []
        for start in planned.starts:
            job = self._jobs.find_job(start.key)
            if isinstance(job, PrefillJob):
                self._producer.start(job.offer, start.leased)
        if planned.step is not None and planned.step.digests:
            self._producer.on_planned(planned.step)
        for grant in planned.pulls:
            effects += self._apply(self._consumer.on_blocks(grant, now), now)
        is_stuck = not (planned.step or planned.pulls or self._scheduler.num_open_plans or self._consumer.num_reads)
        back = self._drain_migration.blocking_jobs() if is_stuck else ()
        return planned.step, effects + [x for key in back for x in self._requeue(key, now)]

    @property
    def may_begin(self) -> bool:
        """Return whether fewer plans are open than `plan_depth`."""
        return self._scheduler.num_open_plans < self._plan_depth

    def finish(self, result: StepResult, now: float) -> list[Effect]:
        """Apply the result of a plan; plans finish in the order in which they began."""
        effects: list[Effect] = []
        times = self._times
        times.finished(now)
        for progress in self._scheduler.commit(result):
            if progress.scores:
                prompt_key = (self._jobs.live_keys(progress.key) or [progress.key])[0]
                effects.append(PromptLogprobs(prompt_key, progress.first_scored, progress.scores))
            for part in progress.parts:
                self.num_generated += len(part.tokens)
                effects += tokens(
                    part,
                    times.first_tokens_sampled(part, now)
                    if part.tokens and part.key in times.awaiting_first_token
                    else None,
                )
                effects += [] if part.has_ended else self._drain_migration.computed(part)
            if isinstance(progress.job, PrefillJob):
                effects += self._producer.on_chunk(progress.job, progress, now)
            effects += self._settle(progress, now)
        effects += self._producer.on_digests(result.number, result.digests, now)
        return effects + self._apply(self._consumer.read_on(now), now)

    def run(self, limit: int) -> DecodeRun | None:
        """Return the decode steps that `begin` would plan next, as long as they repeat with the same sequences; change
        nothing.

        None while a choice has its first token still to sample, because first tokens are recorded by `finish`.
        """
        if self._times.awaiting_first_token or self._producer.blocks_to_digest():
            return None
        return self._scheduler.run(limit)

    def finish_run(self, run: DecodeRun, sampled: Sequence[Sequence[int]]) -> list[TokenRun]:
        """Apply the first steps of a run: `sampled` holds equally many tokens for each sequence, in the run's order. No
        sequence ends."""
        self.num_generated += sum(len(ids) for ids in sampled)
        return self._scheduler.commit_run(run, sampled)

    # ---- the producer's side of hand-offs

    def follow(
        self, key: HandoffKey, consumer: WorkerRef, now: float, prefix_request: RemotePrefixRequest | None = None
    ) -> list[Effect]:
        """Start sending a hand-off's announcements to `consumer`, from the first on.

        `prefix_request`: the hand-off is a remote prefix fetch, and these cached blocks are leased now.
        """
        self._drain_migration.follow(key, now)
        return self._producer.on_follow(key, consumer, now, prefix_request, self._scheduler.demand())

    def renew(self, keys: Iterable[HandoffKey], consumer: WorkerRef, now: float) -> list[Effect]:
        """Extend leases of a consumer; `now` is when the producer answers."""
        return self._producer.on_renew(keys, consumer, now)

    def request_remainder(self, key: HandoffKey, num_output_tokens: int) -> None:
        """Hand over a migrating sequence after its next token, because its consumer has nearly all of its KV.

        The consumer knows the first `num_output_tokens` output tokens.
        """
        self._drain_migration.request_remainder(key, num_output_tokens)

    def release(self, key: HandoffKey, now: float, *, is_taken: bool = False) -> list[Effect]:
        """End a lease that its consumer has released. A prefill that still runs for the lease ends, and so does a
        sequence that has migrated to the consumer."""
        if self._drain_migration.has(key):
            moved = self._drain_migration.released(key, now, is_taken=is_taken)
            return [] if moved is None else self._settle(self._scheduler.release_migrated(moved), now)
        return self._cancel_all(self._producer.on_release(key, now), now)

    def revoke_lease(self, key: HandoffKey, now: float) -> list[Effect]:
        """End a lease that the gateway does not need any more; a prefill that still runs for it ends. Blocks that a
        consumer may be reading are held until the consumer releases them."""
        if self._drain_migration.revoked(key, now):
            return []
        job_key, effects = self._producer.on_revoke(key, now)
        return [*effects, *self._cancel_all(job_key, now)]

    # ---- the consumer's side

    def announced(self, message: Announcement, now: float) -> list[Effect]:
        """Apply an announcement of a source. The first tokens in it are sent to the gateway at once, before the KV
        arrives."""
        pull = self._consumer.find(message.key)
        if pull is None:
            return []
        keys = self._jobs.live_keys(pull.job.key)
        if not pull.is_prefix_fetch:
            self._scheduler.on_producer_ready(keys[0])
        return self._apply(self._consumer.on_announcement(message, keys, now), now)

    def handoff_ended(self, key: HandoffKey, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """Give up the pull of a hand-off that its source has ended. CANCELLED: the source has nothing left to hand
        over."""
        return self._apply(self._consumer.on_handoff_ended(key, kind, message, now), now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """Apply the answer of a source to a StreamHandoff or Renew that was sent at `sent_at`."""
        self._consumer.on_renewed(keys, sent_at, lease_s)

    def read_done(self, read: int, now: float) -> list[Effect]:
        return self._apply(self._consumer.on_read_done(read, now), now)

    def read_failed(self, read: int, reason: str, *, drained: bool, now: float) -> list[Effect]:
        """Give up the pull of a failed read; return no effects if its job has ended already."""
        return self._apply(self._consumer.on_read_failed(read, reason, drained=drained, now=now), now)

    def source_lost(self, source: WorkerRef, reason: str, now: float) -> list[Effect]:
        """Give up all pulls from a source that cannot be reached; reads in flight go on until the transport reports
        their end."""
        return self._apply(self._consumer.on_source_lost(source, reason, now), now)

    def peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[Effect]:
        """Give up all pulls from a peer that the transport has lost; `proven`: none of its reads can still write."""
        return self._apply(self._consumer.on_peer_lost(source, reason, proven=proven, now=now), now)

    def take_events(self) -> list[KVFact]:
        """Return the KV events since the last call, see `BlockPool.take_events`."""
        return self._pool.take_events()

    def abandon(self, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """Fail every live job, because nothing can be computed any more; the engine must not be used afterwards."""
        effects: list[Effect] = []
        for key in self.live_jobs():
            effects.append(Failed(key, kind, message))
            ended = dropped_choice(self._scheduler.num_output(key), kind, message, "failed")
            effects += self._record_end(key, ended, now)
        return effects

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        """Enforce deadlines; to be called several times per second even if there is no work."""
        expired, effects = self._producer.on_tick(now)
        for ended in [ended for ended in expired if not self._drain_migration.expired(ended.key)]:
            job = None if ended.job is None else self._jobs.find_job(ended.job)
            if job is not None:
                effects += self._fail(job, ErrorKind.KV_LOST, "nobody renewed the lease of this prefill", now)
        effects += self._migrate_or_requeue(now) + self._apply(self._consumer.on_tick(now), now)
        self._jobs.forget(now)
        return effects

    def next_deadline(self) -> float:
        """Return the time before which `tick` has nothing to do unless an event arrives; minus infinity if it has work
        at once."""
        return (
            -math.inf
            if self._drain_migration.is_due
            else min(self._producer.next_expiry(), self._consumer.next_deadline())
        )

    # ---- state and statistics

    @property
    def pacer(self) -> StepSizer:
        """Return the step sizer, to which drivers report step times; later step sizes follow from these."""
        return self._scheduler.pacer

    def drained(self) -> DrainResult:
        """Return the progress of a drain."""
        return DrainResult(self.num_live, self._drain_migration.num_migrated, self._drain_migration.num_requeued)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is running, offered or being read."""
        return not (len(self._jobs) or self._scheduler.num_sequences or len(self._producer) or self._consumer.num_reads)

    @property
    def num_live(self) -> int:
        """Count the live choices and the leases, for all of which a drain waits."""
        return len(self._jobs) + len(self._producer)

    @property
    def is_transferring(self) -> bool:
        """Return whether a lease or a read is open, so that the transport must be polled often."""
        return len(self._producer) > 0 or len(self._consumer) > 0 or self._consumer.num_reads > 0

    def live_jobs(self) -> list[JobKey]:
        """Return the keys of all choices that have not ended."""
        return self._jobs.keys()

    def load(self) -> WorkerLoad:
        return self._scheduler.load(draining=self.draining, num_remote_hit_tokens=self._consumer.num_prefix_tokens)

    def books(self) -> EngineStats:
        pool = self._pool
        return EngineStats(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_table_blocks=sum(len(table) for table in self._tables()),
            num_leased_blocks=pool.num_leased,
            num_reading_blocks=pool.num_reading,
            num_quarantined_blocks=self._consumer.num_quarantined,
            num_sequences=self._scheduler.num_sequences,
            num_leases=len(self._producer),
            num_pulls=len(self._consumer),
            num_host_blocks=pool.host.num_held,
        )

    def check(self) -> None:
        """Recount all state from its parts, and raise AssertionError naming the first difference."""
        scheduler, producer, consumer = self._scheduler, self._producer, self._consumer
        scheduler.check()
        copied, pinned = scheduler.copied_blocks(), scheduler.copied_slots()
        self._pool.check(self._tables(), producer.blocks(), consumer.blocks(), copied, pinned)
        self._drain_migration.check()
        self._times.check(job.key for job in self._jobs)
        keys = {job.key for job in self._jobs} | set(self._jobs.keys())
        producer.check(keys)
        consumer.check(keys)
        fetching = {
            job.key for job in self._jobs if self._scheduler.is_awaiting_prefix(self._jobs.live_keys(job.key)[0])
        }
        assert fetching == {pull.job.key for pull in consumer if pull.is_prefix_fetch}, (
            "remote prefixes and jobs differ"
        )

    def __repr__(self) -> str:
        return f"<engine {len(self._jobs)} jobs, {len(self._producer)} leases, {self._scheduler!r}, {self._pool!r}>"

    # ---- internals

    def _settle(self, progress: SequenceUpdate, now: float) -> list[Effect]:
        """Remove the choices that the scheduler has ended, and return the events for their gateway."""
        effects: list[Effect] = []
        for part in (part for part in progress.parts if part.has_ended):
            kind = ErrorKind.CANCELLED if part.error is None else part.error_kind
            effects += self._forget(part.key, now, kind, part.error or "nothing is left to hand over")
            effects.append(ending(part))
            effects += self._record_end(part.key, ended_choice(part), now)
        return effects

    def _drop(
        self, keys: Iterable[JobKey], now: float, kind: ErrorKind, reason: str, outcome: Outcome | None = None
    ) -> list[Effect]:
        """End running choices without an event to their gateway. `outcome`: overrides the outcome that follows from
        `kind`."""
        effects: list[Effect] = []
        for key in keys:
            ended = dropped_choice(self._scheduler.num_output(key), kind, reason, outcome)
            effects += self._forget(key, now, kind, reason)
            self._scheduler.cancel(key)
            effects += self._record_end(key, ended, now)
        return effects

    def _forget(self, key: JobKey, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """Remove an ended choice from the job table, and withdraw its offer to other workers."""
        self._jobs.end(key, now)
        return self._drain_migration.ended(key, kind, reason, now)

    def _record_end(self, key: JobKey, ended: EndedChoice, now: float) -> list[Effect]:
        times = self._times.choice_ended(key, ended, now)
        return [] if times is None else [JobEnded(times)]

    def _stop(self, job: Job, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """End a job and its hand-offs without an event to its gateway."""
        effects: list[Effect] = []
        for effect in self._consumer.drop(job, kind, reason, now):
            if isinstance(effect, PullEnded):
                self._times.pulled(job.key, effect.times)
            else:
                effects.append(effect)
        if isinstance(job, PrefillJob):
            effects += self._producer.withdraw(job.offer, kind, reason, now)
        return effects + self._drop(self._jobs.live_keys(job.key), now, kind, reason)

    def _stop_choice(self, key: JobKey, job: Job, now: float, kind: ErrorKind, reason: str) -> list[Effect]:
        """End one choice of a job, and the job with its last choice, without an event to its gateway."""
        is_last = self._jobs.live_keys(job.key) == [key]
        return self._stop(job, now, kind, reason) if is_last else self._drop([key], now, kind, reason)

    def _apply(self, effects: Iterable[ConsumerEffect], now: float) -> list[Effect]:
        """Apply the ends of pulls to their jobs, and return the effects for the driver."""
        out: list[Effect] = []
        for effect in effects:
            out += self._end_pull(effect, now) if isinstance(effect, PullEnded) else [effect]
        return out

    def _end_pull(self, ended: PullEnded, now: float) -> list[Effect]:
        """Start a job whose KV has arrived, or whose remote prefix has; fail a Resume whose pull was given up."""
        job, times = ended.job, ended.times
        keys = self._jobs.live_keys(job.key)
        self._times.pulled(job.key, times)
        if ended.kind is not None:
            # CANCELLED: nothing is left to hand over, so the job has done its part, see `pull_failure_event`.
            outcome: Outcome | None = "finished" if ended.kind is ErrorKind.CANCELLED else None
            effects = self._drop(keys, now, ended.kind, ended.message, outcome)
            return effects + [pull_failure_event(key, job, ended.kind, ended.message) for key in keys]
        if not isinstance(job, ResumeJob):
            self._scheduler.on_prefix_ready(keys[0])
            return [kv_received(keys[0], times)] if times.num_blocks else []
        progress = self._scheduler.kv_arrived(job.key, ended.first_tokens, ended.num_cached, ended.num_computed)
        received = kv_received(progress.parts[0].key, times)
        return [received, *self._settle(progress, now)]

    def _fetch_remote_prefix(self, job: GenerateJob | PrefillJob, now: float) -> list[Effect]:
        """Request the remote prefix for which an accepted job waits; let the job start if that is not possible."""
        hashes = self._scheduler.awaited_prefix(job.key)
        if not hashes:
            return []
        cost = self._scheduler.pacer.model.published
        effects = self._consumer.on_remote_prefix(job, hashes, self._scheduler.demand(), cost, now)
        if effects is None:
            self._scheduler.on_prefix_ready(job.key)
        return self._apply(effects or (), now)

    def _tables(self) -> Iterator[BlockTable]:
        return chain(self._scheduler.tables(), self._consumer.prefix_tables())

    def _migrate_or_requeue(self, now: float) -> list[Effect]:
        """Offer the running sequences of a draining worker, and requeue its jobs that have nothing to migrate."""
        back = (x for key in self._drain_migration.not_worth_migrating() for x in self._requeue(key, now))
        return [*back, *self._drain_migration.offer()]

    def _requeue(self, key: JobKey, now: float) -> list[Effect]:
        """Fail a choice as DRAINING, so that its gateway has another worker compute it anew."""
        job, failed = self._jobs.find(key), Failed(key, ErrorKind.DRAINING, "this worker is about to stop")
        assert job is not None, f"{key} is here without a job"
        self._drain_migration.num_requeued += 1
        return [*self._stop_choice(key, job, now, failed.kind, failed.message), failed]

    def _cancel_all(self, job_key: JobKey | None, now: float) -> list[Effect]:
        return [x for key in (self._jobs.live_keys(job_key) if job_key else ()) for x in self.cancel(key, now)]

    def _fail(self, job: Job, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        keys = self._jobs.live_keys(job.key)
        return [*self._stop(job, now, kind, message), *(Failed(key, kind, message) for key in keys)]

    def _open_lease(self, job: PrefillJob, now: float) -> list[Effect]:
        """Open the lease of a job that the scheduler has accepted; the job of a fenced older hand-off ends."""
        try:
            older, effects = self._producer.open(job.offer, job.key, now)
        except TandemError:
            for key in job.keys:
                self._scheduler.cancel(key)
            raise
        return [*effects, *self._cancel_all(older, now)]
