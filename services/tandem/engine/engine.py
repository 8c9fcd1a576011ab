"""Combine the scheduler, the leases and the pulls of one worker into an engine that plans steps and applies their
results.

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
from tandem.core.ids import BlockHash, HandoffKey, HostSlot, JobKey, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.worker_load import DrainResult, EngineStats, WorkerLoad
from tandem.engine.effects import ConsumerEffect, Effect, JobEnded, PullEnded
from tandem.engine.file_tier import FileProgress, FileTier
from tandem.engine.job_events import ending, kv_received, pull_failure_event, tokens
from tandem.engine.job_table import JobTable
from tandem.engine.job_timeline import EndedChoice, JobTimeline, Outcome, dropped_choice, ended_choice
from tandem.engine.kv_consumer import KVConsumer
from tandem.engine.kv_producer import KVProducer
from tandem.engine.migration import Migrations
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.handoff import Announcement, RemotePrefixRequest
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.phases.decode_run import DecodeRun
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.step_plan import StepPlan, StepResult

TICK_S = 0.05
"""Longest time in seconds between two checks of the engine's deadlines while it has work."""
_STOPS = "this worker is about to stop"
_NO_BLOCK_LEFT = "sequences that migrate to other workers hold all KV blocks"


class Engine:
    """Make all decisions of one worker: which jobs it accepts, what each step computes, and which KV blocks move.

    A driver calls `submit` for each job, `begin` to get a plan for its executor, `finish` with the result, and `tick`
    several times per second; it carries out the returned effects. Up to `plan_depth` plans may be open, that is begun
    and not finished. The argument `now` of all methods is the current time in seconds of the driver's clock.

    - `pool`: this worker's KV blocks. `limits`: what a step may hold at most.
    - `handoff`: how long a lease lasts without renewal, and after how long a pull without progress or a read that does
      not end is given up.
    - `model_fingerprint`: becomes part of the block hashes. `block_bytes`: size of a KV block, used only to convert
      blocks to bytes in reports.
    - `speculation`: how tokens are drafted; with None a step samples at most one token of each sequence.

    Attributes: `num_preempted`: preemptions of sequences since the start. `num_generated`: tokens sampled since the
    start. `draining`: whether the worker drains.
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
        self._files = FileTier(pool)
        self._migrations = Migrations(self._scheduler.state, self._producer)
        self._jobs = JobTable()
        self._times = JobTimeline()
        self._plan_depth = plan_depth
        self.draining = False
        self.num_preempted = 0
        self.num_generated = 0

    # ---- jobs

    def submit(self, job: Job, now: float) -> list[Effect]:
        """Accept a job and return the first effects; raise TandemError, and keep nothing of the job, if it is rejected.

        A job that is here already, or has ended in the last two minutes, is not accepted again: the result is empty. A
        newer attempt of a request ends the older one. Choices that were cancelled before the job arrived end
        immediately.
        """
        conflicts = self._jobs.examine(job)
        if conflicts is None:
            return []
        fenced, tombstoned = conflicts
        if self.draining:
            raise TandemError(ErrorKind.DRAINING, "this worker is draining and accepts no new jobs", retry_after_s=1.0)
        if isinstance(job, ResumeJob):
            self._consumer.check_free(job)
        self._jobs.forget(now)
        self._scheduler.add(job, now)
        effects = self._open_lease(job, now) if isinstance(job, PrefillJob) else []
        effects += [effect for older in fenced for effect in self.cancel(older, now)]
        self._jobs.add(job)
        self._times.accepted(job, now)
        effects += self._consumer.on_resume(job, now) if isinstance(job, ResumeJob) else self._fetch_prefix(job, now)
        return effects + [effect for key in tombstoned for effect in self.cancel(key, now)]

    def cancel(self, key: JobKey, now: float) -> list[Effect]:
        """End one choice of a job, and with its last choice the job; the effects include `Cancelled`.

        The result is empty for a choice that is not live. If the choice was never submitted here, it is rejected when
        it arrives later.
        """
        job = self._jobs.find(key)
        if job is None:
            if not self._jobs.is_known(key):
                self._jobs.tombstone(key, now)
            return []
        return [*self._stop_choice(key, job, now, ErrorKind.CANCELLED, "cancelled"), Cancelled(key)]

    def offer_migration(self, keys: Iterable[JobKey], now: float) -> list[Effect]:
        """Offer running or preempted choices to other workers, and return one `MigrationOffered` for each; running ones
        go on sampling until another worker has taken over.

        Choices that have not begun here, or that another worker takes over already, are left out.
        """
        return [effect for key in keys for effect in self._migrations.offer(key, now)]

    def start_drain(self, now: float) -> list[Effect]:
        """Reject new jobs from now on, and migrate or requeue the accepted jobs.

        A running sequence is offered to other workers and keeps sampling until one takes it over. A job that holds no
        KV yet, or whose blocks the other migrating sequences need, fails as DRAINING, so that its gateway submits it
        elsewhere. Prefills end as usual.
        """
        self.draining = True
        self._migrations.begin_drain(now)
        return self._migrate_or_requeue(now)

    def end_drain(self) -> list[Effect]:
        """Accept new jobs again after `start_drain`, and return no effects. Sequences that other workers were offered
        may still move."""
        self.draining = False
        self._migrations.end_drain()
        return []

    # ---- the step

    def begin(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        """Plan the next step; return the plan, which the driver passes to the executor, and the effects.

        The plan is None when there is nothing to compute or `plan_depth` plans are open. A plan that is returned must
        be finished by `finish`.
        """
        if not self.may_begin:
            return None, []
        planned = self._scheduler.plan(now, self._producer.blocks_to_digest())
        self.num_preempted += planned.num_preempted + planned.num_yielded
        self._times.planned(planned, now)
        effects: list[Effect] = [*planned.preempted]
        for start in planned.starts:
            job = self._jobs.find_job(start.key)
            if isinstance(job, PrefillJob):
                self._producer.start(job.offer, start.leased)
        if planned.step is not None:
            self._producer.on_planned(planned.step)
        for grant in planned.pulls:
            effects += self._apply(self._consumer.on_blocks(grant, now), now)
        is_stuck = not (planned.step or planned.pulls or self._scheduler.num_open_plans or self._consumer.num_reads)
        back = self._migrations.blocking_jobs() if is_stuck else ()
        return planned.step, effects + [x for key in back for x in self._requeue(key, _NO_BLOCK_LEFT, now)]

    @property
    def may_begin(self) -> bool:
        """Return whether fewer than `plan_depth` plans are open, so that `begin` may return another one."""
        return self._scheduler.num_open_plans < self._plan_depth

    def finish(self, result: StepResult, now: float) -> list[Effect]:
        """Apply the result of the oldest open plan, and return the events for gateways and the messages for other
        workers.

        Raises ValueError for the result of any other plan.
        """
        effects: list[Effect] = []
        times = self._times
        times.finished(now)
        for progress in self._scheduler.commit(result, now):
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
                effects += [] if part.has_ended else self._migrations.computed(part)
            if isinstance(progress.job, PrefillJob):
                effects += self._producer.on_chunk(progress.job, progress, now)
            effects += self._settle(progress, now)
        effects += self._producer.on_digests(result.number, result.digests, now)
        self._migrations.end_withdrawn()
        return effects + self._apply(self._consumer.read_on(now), now) + self._files.writes(now)

    def run(self, limit: int) -> DecodeRun | None:
        """Forecast the next steps that `begin` would plan, at most `limit`, and return them as one run: every step
        decodes one token of each running sequence, and these are the same sequences in all steps. Changes nothing.

        Returns None if the next step is not such a decode, while blocks of a prefix that another worker requested are
        still to be digested, or while a choice has not sampled its first token here, because only `finish` records
        first tokens.
        """
        if self._times.awaiting_first_token or self._producer.blocks_to_digest():
            return None
        return self._scheduler.run(limit)

    def load_key(self, plan: StepPlan) -> tuple[object, ...] | None:
        """Return a value from which a caller of `finish` for `plan` knows whether `load` has changed, as
        `Scheduler.load_key` does. Commands and ticks may change the load without it."""
        return self._scheduler.load_key(plan)

    def finish_run(self, run: DecodeRun, sampled: Sequence[Sequence[int]]) -> list[TokenRun]:
        """Apply the first steps of a run, a series of identical decode steps, and return the tokens of each sequence.

        `run`: what the method `run` returned. `sampled`: one list of token ids per sequence, in the order of
        `run.seqs`; all lists have the same length, the number of steps to apply. No sequence ends in these steps.
        Raises ValueError when `run` is not the next series of steps.
        """
        self.num_generated += sum(len(ids) for ids in sampled)
        return self._scheduler.commit_run(run, sampled)

    # ---- the producer's side of hand-offs

    def follow(
        self, key: HandoffKey, consumer: WorkerRef, now: float, prefix_request: RemotePrefixRequest | None = None
    ) -> list[Effect]:
        """Let the worker `consumer` follow a hand-off of this worker: send it the announcements already made
        immediately, and later ones as they are made.

        With a `prefix_request` the hand-off is a remote prefix fetch, and its blocks that are cached here are leased
        first. If the hand-off has ended, the consumer is notified instead.
        """
        self._migrations.follow(key, now)
        return self._producer.on_follow(key, consumer, now, prefix_request, self._scheduler.demand())

    def renew(self, keys: Iterable[HandoffKey], consumer: WorkerRef, now: float) -> list[Effect]:
        """Extend the leases of the hand-offs `keys`, which `consumer` pulls from this worker, to `now` plus the lease
        time.

        `now` is the time at which this worker, the producer, answers. The effects notify `consumer` of each of these
        hand-offs that has ended or is unknown.
        """
        return self._producer.on_renew(keys, consumer, now)

    def request_remainder(self, key: HandoffKey, num_output_tokens: int, now: float) -> list[Effect]:
        """Stop a migrating sequence because its consumer has nearly all of its KV, and hand it over; return the
        effects.

        `num_output_tokens`: output tokens that the consumer knows. A running sequence stops after one more token, and
        the output tokens that the consumer lacks are sent with the last announcement. A preempted sequence does not
        start again; if its consumer lacks output tokens, the offer is withdrawn instead. Does nothing if no sequence is
        offered under `key`.
        """
        return self._migrations.request_remainder(key, num_output_tokens, self._scheduler.demand(), now)

    def release(
        self, key: HandoffKey, now: float, *, is_taken: bool = False, consumer: WorkerRef | None = None
    ) -> list[Effect]:
        """End the lease of a hand-off that its consumer does not need any more.

        `is_taken`: the consumer has all that was offered. If a migrating sequence has stopped here, it ends with
        `is_taken` and otherwise continues here. A prefill that still computes for the lease ends. `consumer`: the
        worker that releases; nothing happens if another worker has followed the hand-off after it. None: whichever
        worker follows.
        """
        if consumer is not None and self._producer.follower(key) not in (None, consumer):
            return []
        if self._migrations.has(key):
            moved = self._migrations.released(key, now, is_taken=is_taken)
            return [] if moved is None else self._settle(self._scheduler.release_migrated(moved), now)
        return self._cancel_all(self._producer.on_release(key, now), now)

    def revoke_lease(self, key: HandoffKey, now: float) -> list[Effect]:
        """End the lease of a hand-off that the gateway does not need any more, and cancel the prefill that still
        computes for it.

        Blocks that a consumer may be reading are held until it releases them or the lease expires. If the hand-off is
        the offer of a migrating sequence, and a consumer follows it, the offer stays open.
        """
        if self._migrations.revoked(key, now):
            return []
        job_key, effects = self._producer.on_revoke(key, now)
        return [*effects, *self._cancel_all(job_key, now)]

    # ---- the consumer's side

    def announced(self, message: Announcement, now: float) -> list[Effect]:
        """Record an announcement from the source of a pull, and start reading the blocks that it offers.

        First tokens in the announcement are sent to the gateway immediately, before the KV arrives. Ignored if the
        hand-off is not being pulled.
        """
        pull = self._consumer.find(message.key)
        if pull is None:
            return []
        keys = self._jobs.live_keys(pull.job.key)
        if not pull.is_prefix_fetch:
            self._scheduler.on_producer_ready(keys[0], now)
        return self._apply(self._consumer.on_announcement(message, keys, now), now)

    def handoff_ended(self, key: HandoffKey, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """Give up the pull of a hand-off that its source has ended, and end its job unless the pull was a remote prefix
        fetch.

        `kind` and `message` are the source's reason. CANCELLED: the source has nothing left to hand over, so the job
        counts as finished; with any other kind it fails.
        """
        return self._apply(self._consumer.on_handoff_ended(key, kind, message, now), now)

    def renewed(self, keys: tuple[HandoffKey, ...], sent_at: float, lease_s: float) -> None:
        """Extend the leases of pulls, after a source has answered a renewal or the request to follow a hand-off.

        The new end is `lease_s` seconds after `sent_at`, the time at which this worker sent the request. Unknown keys
        are ignored.
        """
        self._consumer.on_renewed(keys, sent_at, lease_s)

    def read_done(self, read: int, now: float) -> list[Effect]:
        """Record that all blocks of a read arrived and passed their check. `read` is the number from `StartRead`; an
        unknown one is ignored."""
        return self._apply(self._consumer.on_read_done(read, now), now)

    def read_failed(self, read: int, reason: str, *, drained: bool, now: float) -> list[Effect]:
        """Give up the pull of a failed read, and fail the job unless the pull was a remote prefix fetch.

        `read` is the number from `StartRead`. `drained`: the transport has proven that the read writes no more, so its
        local blocks are free again; otherwise they are held until `peer_lost` proves it. Returns no effects if the pull
        is over already.
        """
        return self._apply(self._consumer.on_read_failed(read, reason, drained=drained, now=now), now)

    def source_lost(self, source: WorkerRef, reason: str, now: float) -> list[Effect]:
        """Give up all pulls from a worker that cannot be reached.

        The local blocks of reads in flight are held until the transport reports the end of each read.
        """
        return self._apply(self._consumer.on_source_lost(source, reason, now), now)

    def peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[Effect]:
        """Give up all pulls from a worker to which the transport has lost its connection.

        `proven`: none of the reads from it can still write, so their local blocks are free again. Otherwise these
        blocks are held until a later call with `proven`.
        """
        return self._apply(self._consumer.on_peer_lost(source, reason, proven=proven, now=now), now)

    # ---- files

    def files_read(self, read: int, num_blocks: int, seconds: float, now: float, *, is_over: bool) -> list[Effect]:
        """Record that the next `num_blocks` blocks of the `ReadFiles` with number `read` are in host memory and passed
        their check; return the next reads.

        Once the blocks that a waiting job shares with this prefix are there, the rest of its own prefix is read, or
        else it may start. `seconds`: how long reading and checking these blocks took. `is_over`: no further block of
        this `ReadFiles` arrives. Then the result has a further `ReadFiles` for the rest of the prefix, or else all jobs
        that wait for the prefix may start.
        """
        cost = self._scheduler.pacer.model.published
        return self._go_on(self._files.on_read(read, num_blocks, seconds, cost, now, is_over=is_over), now)

    def file_written(self, slot: HostSlot, block_hash: BlockHash, now: float, *, is_done: bool) -> list[Effect]:
        """Record that the write of one block of a `WriteFiles` has ended, and return the next writes.

        `slot`, `block_hash`: the block's slot in host memory, and its hash. `is_done`: whether a file holds the block
        now.
        """
        self._files.on_written(slot, block_hash, now, is_done=is_done)
        return [*self._files.writes(now)]

    def files_changed(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Update the record of which KV blocks are in files of the file cache (`engine.file_cache_path`).

        `added`: hashes of blocks for which there is a file now. `removed`: hashes of blocks without a usable file any
        more.
        """
        self._pool.note_files(added, removed)

    # ---- events and ends

    def take_events(self) -> list[KVFact]:
        """Return the KV events since the last call (blocks stored, offloaded to host memory or evicted), oldest first,
        and forget them. They are meant for the prefix index.

        Empty unless the block pool records events (`records_facts` of `build_engine`).
        """
        return self._pool.take_events()

    def abandon(self, kind: ErrorKind, message: str, now: float) -> list[Effect]:
        """Fail every live job with `kind` and `message`, because nothing can be computed any more, as after the loss of
        the device.

        Returns a `Failed` event for each choice and a `JobEnded` for each job. The engine must not be used afterwards.
        """
        effects: list[Effect] = []
        for key in self.live_jobs():
            effects.append(Failed(key, kind, message))
            ended = dropped_choice(self._scheduler.num_output(key), kind, message, "failed")
            effects += self._record_end(key, ended, now)
        return effects

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        """Enforce the deadlines of leases, pulls and reads of files, and continue a drain; to be called several times a
        second even when idle.

        A prefill whose lease has expired fails as KV_LOST.
        """
        expired, effects = self._producer.on_tick(now)
        for ended in [ended for ended in expired if not self._migrations.expired(ended.key)]:
            job = None if ended.job is None else self._jobs.find_job(ended.job)
            if job is not None:
                effects += self._fail(job, ErrorKind.KV_LOST, "nobody renewed the lease of this prefill", now)
        effects += self._migrate_or_requeue(now) + self._apply(self._consumer.on_tick(now), now)
        self._start_waiting(self._files.on_tick(now), now)
        effects += self._files.writes(now)
        self._jobs.forget(now)
        self._pool.end_retentions(now)
        return effects

    def next_deadline(self) -> float:
        """Return the time before which `tick` has nothing to do unless another method is called.

        Minus infinity: `tick` has work now. Infinity: there is nothing to wait for.
        """
        return (
            -math.inf
            if self._migrations.is_due
            else min(self._producer.next_expiry(), self._consumer.next_deadline(), self._files.next_deadline())
        )

    # ---- state and statistics

    @property
    def pacer(self) -> StepSizer:
        """Return the step sizer, to which the driver reports measured step times (`StepSizer.measured`)."""
        return self._scheduler.pacer

    def drained(self) -> DrainResult:
        """Return the progress of a drain: how many choices and leases are left, and how many choices have migrated or
        were requeued."""
        return DrainResult(self.num_live, self._migrations.num_migrated, self._migrations.num_requeued)

    @property
    def is_idle(self) -> bool:
        """Return whether the engine holds no job, no sequence, no lease and no read in flight, so that the worker may
        stop."""
        return not (len(self._jobs) or self._scheduler.num_sequences or len(self._producer) or self._consumer.num_reads)

    @property
    def is_using_files(self) -> bool:
        """Return whether a block is being read from a file or written to one."""
        return self._files.is_busy

    @property
    def num_live(self) -> int:
        """Return the number of live choices plus the number of leases. A drain is complete when it is 0."""
        return len(self._jobs) + len(self._producer)

    @property
    def is_transferring(self) -> bool:
        """Return whether a lease, a pull or a read is open, so that the driver must poll the transport often."""
        return len(self._producer) > 0 or len(self._consumer) > 0 or self._consumer.num_reads > 0

    def live_jobs(self) -> list[JobKey]:
        """Return the keys of all live choices, that is those that were accepted and have not ended; a job has one key
        per choice."""
        return self._jobs.keys()

    def load(self) -> WorkerLoad:
        """Return the load report that this worker sends to gateways, for routing."""
        return self._scheduler.load(draining=self.draining, num_remote_hit_tokens=self._consumer.num_prefix_tokens)

    def books(self) -> EngineStats:
        """Return how many blocks each kind of holder has, and the numbers of sequences, leases and pulls, for metrics
        and tests."""
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
            num_retained_blocks=pool.num_retained,
            num_file_blocks=len(pool.host.in_files),
            num_file_hit_tokens=self._files.num_read_tokens,
        )

    def check(self) -> None:
        """Compare all counters with a recount; raise AssertionError naming the first difference. For tests."""
        scheduler, producer, consumer = self._scheduler, self._producer, self._consumer
        scheduler.check()
        copied, pinned = scheduler.copied_blocks(), chain(scheduler.copied_slots(), self._files.slots())
        self._pool.check(self._tables(), producer.blocks(), consumer.blocks(), copied, pinned)
        self._migrations.check()
        self._times.check(job.key for job in self._jobs)
        keys = {job.key for job in self._jobs} | set(self._jobs.keys())
        producer.check(keys)
        consumer.check(keys)
        fetching = {job.key for job in self._jobs if scheduler.awaited_prefix(self._jobs.live_keys(job.key)[0])}
        remote = {pull.job.key for pull in consumer if pull.is_prefix_fetch}
        assert fetching == remote | set(self._files.waiting_jobs()), "fetched prefixes and jobs differ"

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
        """End running choices without an event to their gateway. `outcome`: the outcome to record; None: that which
        follows from `kind`."""
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
        return self._migrations.ended(key, kind, reason, now)

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
        self._files.drop(job.key)
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
        """Start a job whose KV has arrived, or whose remote prefix has; fail a `ResumeJob` whose pull was given up."""
        job, times = ended.job, ended.times
        keys = self._jobs.live_keys(job.key)
        self._times.pulled(job.key, times)
        if ended.kind is not None:
            # CANCELLED: nothing is left to hand over, so the job has done its part, see `pull_failure_event`.
            outcome: Outcome | None = "finished" if ended.kind is ErrorKind.CANCELLED else None
            effects = self._drop(keys, now, ended.kind, ended.message, outcome)
            return effects + [pull_failure_event(key, job, ended.kind, ended.message) for key in keys]
        if not isinstance(job, ResumeJob):
            self._scheduler.on_prefix_ready(keys[0], now)
            return [kv_received(keys[0], times)] if times.num_blocks else []
        progress = self._scheduler.kv_arrived(job.key, ended.first_tokens, ended.num_cached, ended.num_computed)
        received = kv_received(progress.parts[0].key, times)
        return [received, *self._settle(progress, now)]

    def _fetch_prefix(self, job: GenerateJob | PrefillJob, now: float) -> list[Effect]:
        """Begin to fetch the prefix for which an accepted job waits: from another worker if that one has more of it
        than files have, else from files. Let the job start if neither is possible."""
        hashes = self._scheduler.awaited_prefix(job.key)
        if not hashes:
            return []
        cost = self._scheduler.pacer.model.published
        num_filed = self._pool.count_reachable(hashes)
        if num_filed < len(hashes):
            pulled = self._consumer.on_remote_prefix(job, hashes, self._scheduler.demand(), cost, now)
            if pulled is not None:
                return self._apply(pulled, now)
        return self._go_on(self._files.fetch(job.key, hashes[:num_filed], cost, now), now)

    def _go_on(self, progress: FileProgress, now: float) -> list[Effect]:
        self._start_waiting(progress.ready, now)
        return [*progress.orders]

    def _start_waiting(self, jobs: Iterable[JobKey], now: float) -> None:
        """Let jobs start that have waited for a read from files."""
        for job in jobs:
            self._scheduler.on_prefix_ready(self._jobs.live_keys(job)[0], now)

    def _tables(self) -> Iterator[BlockTable]:
        return chain(self._scheduler.tables(), self._consumer.prefix_tables(), self._producer.tables())

    def _migrate_or_requeue(self, now: float) -> list[Effect]:
        """Offer the running sequences of a draining worker, and requeue its jobs that have nothing to migrate."""
        back = (x for key in self._migrations.not_worth_migrating() for x in self._requeue(key, _STOPS, now))
        return [*back, *self._migrations.offer_all()]

    def _requeue(self, key: JobKey, reason: str, now: float) -> list[Effect]:
        """Fail a choice as DRAINING, so that its gateway has another worker compute it anew."""
        job, failed = self._jobs.find(key), Failed(key, ErrorKind.DRAINING, reason)
        assert job is not None, f"{key} is here without a job"
        self._migrations.num_requeued += self.draining
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
