"""Own every live sequence and decide what each step computes, given the time; models, KV transfers and clocks are
outside.

There is no prefill phase and no decode phase, only sequences with tokens still to compute: a step takes every decode
first and fills the rest of its budget with prefill chunks (Sarathi-Serve, OSDI 2024). `budget.step_sizer` decides how
large that rest is, `budget.prefill_sharing` how prompts share it. Sequences are planned in order and preempted, to be
recomputed, only from the tail that the plan has not reached. Several plans may be open; they are committed in the order
in which they were made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import chain

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import FinishReason, SampledToken, TokenRun
from tandem.core.ids import BlockId, HostSlot, JobKey, SeqId
from tandem.core.request import Job, PrefillJob
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.handoff import BlockDigest
from tandem.kv.hashing import root_hash
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.phases.admitter import Admitter
from tandem.sched.state.blocked_pulls import BlockedPulls
from tandem.sched.phases.decode_run import DecodeRun, advance, forecast
from tandem.sched.phases.fork import failure, fork_sequence, fork_update
from tandem.sched.phases.job_admission import check_job
from tandem.sched.state.block_needs import pull_need
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.phases.prefill_budget import assign_prefill_budget
from tandem.sched.phases.rejected_jobs import RejectedJobs
from tandem.sched.phases.spec_decode import Speculation, num_spare_blocks
from tandem.sched.state.backlog import backlog, check_backlog, horizon_tokens
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import ScheduleResult, SchedulerLoad, SequenceUpdate
from tandem.sched.state.sequence import Sequence, Status
from tandem.sched.state.sequence_queue import OrderedQueue
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult
from tandem.sched.transfer.migration import MigrationTracker
from tandem.sched.transfer.prefix_serving import PrefixServer
from tandem.sched.transfer.remote_prefix import RemotePrefixFetches


class Scheduler:
    """Own the sequences that wait, run, or wait for their KV. The module docstring describes the order of service."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, model_fingerprint: str, speculation: Speculation | None = None
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.pacer = StepSizer(limits.max_num_batched_tokens)
        self.speculation = speculation
        self._fingerprint = model_fingerprint
        self._waiting = OrderedQueue()
        self._running = OrderedQueue()
        self._pulling: dict[JobKey, Sequence] = {}
        self._reserved_blocks: dict[SeqId, int] = {}
        self._admitter = Admitter(pool, limits, self._waiting, self._running, self._pulling, self._reserved_blocks)
        self._closing: dict[SeqId, Sequence] = {}
        self._by_key: dict[JobKey, Sequence] = {}
        self._by_id: dict[SeqId, Sequence] = {}
        self.migrations = MigrationTracker(pool, limits, self._waiting, self._running, self._pulling, self._by_key)
        self.remote_prefixes = RemotePrefixFetches(pool, self._running, self._reserved_blocks, self._by_key)
        self.prefix_server = PrefixServer(pool, self._running, self._reserved_blocks)
        self._open: dict[int, StepPlan] = {}
        self._blocked_pulls = BlockedPulls()
        self._rejected_jobs = RejectedJobs()
        self._num_arrived = 0
        self._num_plans = 0

    # ---- jobs

    def add(self, job: Job, now: float = 0.0) -> None:
        """Accept a job. Raises TandemError, and keeps nothing of the job, when it can never run or there is no room."""
        if any(key in self._by_key for key in job.keys):
            raise TandemError(ErrorKind.INVALID_REQUEST, f"job {job.key} was accepted already")
        check_job(job, self._admitter.reserved_capacity(), self.limits, self.pool.block_size, self._rejected_jobs, now)
        root = root_hash(self._fingerprint, self.pool.block_size, job.request.cache_salt)
        seq = Sequence(SeqId(self._num_arrived), job, root, self._num_arrived, now)
        # Hash the prompt now, rather than between two steps or between a hand-off and the first read of its blocks.
        seq.reusable(self.pool.block_size)
        self.remote_prefixes.await_prefix(seq)
        if not seq.is_pull:
            check_backlog(seq, self.pool, self.occupancy().backlog)
        self._num_arrived += job.num_choices
        self._by_id[seq.id] = seq
        self._by_key.update(dict.fromkeys(seq.keys, seq))
        if seq.is_pull:
            self._reserved_blocks[seq.id] = self._pull_need(job)
        self._waiting.add(seq)

    def cancel(self, key: JobKey) -> bool:
        """End a choice of a job; returns False for an unknown key. The blocks of the last choice are freed at once, or
        when the last open plan that names the sequence is committed."""
        seq = self._by_key.get(key)
        if seq is None:
            return False
        if len(seq.choices) > 1:
            seq.choices.remove(key.choice)
            del self._by_key[key]
        else:
            self._end(seq)
        return True

    def release_migrated(self, key: JobKey) -> SequenceUpdate:
        """End a choice that continues on another worker."""
        seq = self._by_key[key]
        self._end(seq)
        return SequenceUpdate(seq.job, seq.num_computed, seq.num_cached, seq.num_output, handed_over=True)

    def on_producer_ready(self, key: JobKey) -> None:
        """Let a Resume compete for room: its producer has begun to offer blocks. `key` names any choice of the job."""
        self._by_key[key].may_start = True

    def kv_arrived(
        self, key: JobKey, first_tokens: tuple[SampledToken, ...], num_cached: int, num_computed: int
    ) -> SequenceUpdate:
        """Start a pulled sequence whose first `num_computed` tokens have complete, verified KV. `key` names its first
        choice.

        `num_cached` of these tokens were prefix-cache hits at the producer. The producer sampled `first_tokens`: the
        next token of each choice, or, for a job of one choice, its last tokens up to the one after the `num_computed`.
        """
        seq = self._pulling.pop(key)
        seq.num_cached = num_cached
        num_known, num_hits = len(seq.tokens), seq.table.num_published * self.pool.block_size
        seq.num_computed = max(min(num_known, num_computed), num_hits)
        seq.status = Status.RUNNING
        self._running.add(seq)
        num_new = num_computed + 1 - num_known
        fresh = first_tokens if seq.is_unforked else first_tokens[len(first_tokens) - max(0, num_new) :]
        return self._append_sampled(seq, fresh)

    # ---- one step

    def plan(self, now: float = 0.0) -> ScheduleResult:
        """Choose the next step's work, and allocate blocks to pulls that may begin. `now` is on the clock of `add`, in
        seconds."""
        builder = PlanBuilder(self.pool, self.limits, self._running, self._waiting)
        if self.prefix_server.is_due(self._num_plans):
            return ScheduleResult(self._open_plan(builder))
        ready = [seq for seq in self._running if seq.is_schedulable]
        for seq in [s for s in ready if s.num_remaining == 1]:
            if seq.status is Status.RUNNING:
                builder.add(seq)
        started = [s for s in ready if s.num_remaining > 1 and s.status is Status.RUNNING]
        may_start = builder.num_preempted == 0 or not (builder.slices or started)
        assign_prefill_budget(
            builder, self.pacer, self._running, started, self._admitter.startable() if may_start else (), now
        )
        if may_start:
            self._admitter.admit(builder)
        builder.add_started(started)
        if self.speculation is not None:
            self.speculation.extend(
                builder, self.pool, self._running, num_spare_blocks(self.pool, self._running, self._waiting)
            )
        step = self._open_plan(builder)
        pulls = self._blocked_pulls.take_clear(self._pulling) + self._blocked_pulls.hold(
            builder.pulls, self._open.values(), self._pulling
        )
        return builder.build(step, pulls)

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Apply the result of the oldest open plan. Tokens after the end of a sequence are dropped. Raises ValueError
        for the result of another plan."""
        if result.number != (number := next(iter(self._open), None)):
            raise ValueError(f"result of plan {result.number}, but the oldest open plan is {number}")
        plan = self._open.pop(result.number)
        self.pool.drop([source for source, _ in plan.copies], Holder.COPY)
        self.pool.end_copies(plan.spills, plan.fills)
        self.prefix_server.committed(result.number, result.digests)
        progress: list[SequenceUpdate] = []
        for piece, outcome in zip(plan.slices, result.slices, strict=True):
            seq = self._by_id[piece.seq]
            seq.num_open_plans -= 1
            if seq.status is not Status.CLOSING:
                progress.append(self._advance(seq, piece, outcome))
        self._blocked_pulls.committed(result.number)
        for seq in [seq for seq in self._closing.values() if seq.num_open_plans == 0]:
            del self._closing[seq.id]
            self._close(seq)
        return progress

    def run(self, limit: int) -> DecodeRun | None:
        """Forecast the next plans, at most `limit`, as long as they are identical decodes; None where the next plan is
        not.

        Changes nothing; the forecast is void after any other call that changes the scheduler.
        """
        has_other_work = self._blocked_pulls.has_clear or self.prefix_server.has_work or self.pool.host.has_copies
        if self._open or has_other_work or self.speculation is not None:
            return None
        has_seats = len(self._running) + len(self._pulling) < self.limits.max_num_seqs
        if has_seats and any(seq.may_start for seq in self._waiting):
            return None
        return forecast(self._num_plans, limit, tuple(self._running), self.pool, self.limits)

    def commit_run(self, run: DecodeRun, sampled: Many[Many[int]]) -> list[TokenRun]:
        """Plan and commit as many steps of a run as tokens were sampled of each sequence; the step-time model learns
        nothing."""
        if self._open or run.number != self._num_plans:
            raise ValueError(f"a run from plan {run.number} on, but the next is {self._num_plans}")
        updates = advance(run, [self._by_id[seq] for seq in run.seqs], sampled, self.pool)
        self._num_plans += len(sampled[0])
        return updates

    # ---- statistics and invariants

    @property
    def num_open_plans(self) -> int:
        return len(self._open)

    @property
    def num_sequences(self) -> int:
        return len(self._by_id)

    def num_output(self, key: JobKey) -> int:
        """Count the known output tokens of a choice; 0 for a choice that is not here."""
        return seq.num_output if (seq := self._by_key.get(key)) is not None else 0

    def occupancy(self) -> SchedulerLoad:
        horizon = horizon_tokens(self.limits, self.pacer.model.published or self.pacer.model.cost)
        queued = backlog(chain(self._running, self._waiting), self.pool.block_size, horizon)
        num_running, num_reserved = len(self._running) + len(self._pulling), sum(self._reserved_blocks.values())
        return SchedulerLoad(num_running, len(self._waiting), num_reserved, queued)

    def tables(self) -> Iterator[BlockTable]:
        """Yield the block tables of all sequences and of open prefix fetches."""
        return chain((seq.table for seq in self._by_id.values()), self.remote_prefixes.tables())

    def copied_blocks(self) -> Iterator[BlockId]:
        """Yield the source block of each copy of an open plan, once per copy."""
        return (source for plan in self._open.values() for source, _ in chain(plan.copies, plan.spills))

    def copied_slots(self) -> Iterator[HostSlot]:
        """Yield the host slot of each copy of an open plan, once per copy."""
        return (slot for plan in self._open.values() for slot in plan.host_slots)

    def check(self) -> None:
        """Recompute the counters of sequences and queues from the open plans. Raises AssertionError naming the first
        mismatch."""
        queued = [*self._waiting, *self._running, *self._pulling.values(), *self._closing.values()]
        _check_queues(queued, self._by_id, self._by_key)
        needed = {s.id: self._pull_need(s.job) for s in queued if s.is_pull and s.status is Status.WAITING}
        assert self._reserved_blocks == needed, f"reserved {self._reserved_blocks}, needed {needed}"
        for seq in queued:
            slices = [s for p in self._open.values() for s in p.slices if s.seq == seq.id]
            _check_sequence(seq, slices, self._blocked_pulls.num_plans(seq), self.pool)
            assert (seq.status is Status.WAITING) == (seq in self._waiting), f"{seq!r}: status"
        assert len(self._running) + len(self._pulling) <= self.limits.max_num_seqs, "more than max_num_seqs run"

    def __repr__(self) -> str:
        queues = f"{len(self._running)} running, {len(self._waiting)} waiting, {len(self._pulling)} pulling"
        return f"<scheduler {queues}, {len(self._closing)} closing, {len(self._open)} plans open>"

    # ---- plan

    def _open_plan(self, builder: PlanBuilder) -> StepPlan | None:
        """Turn a builder into an open plan; None where there is nothing to compute, copy or digest."""
        spills, fills = self.pool.take_copies()
        digests = () if builder.slices else self.prefix_server.take(self._num_plans, builder.num_digests_left)
        if not (builder.slices or spills or fills or digests):
            return None
        step = StepPlan(self._num_plans, tuple(builder.slices.values()), tuple(builder.copies), spills, fills, digests)
        self._open[step.number] = step
        self._num_plans += 1
        self.pacer.planned(step, builder.num_preempted)
        return step

    # ---- commit

    def _advance(self, seq: Sequence, piece: ScheduledSlice, outcome: SliceResult) -> SequenceUpdate:
        seq.num_in_flight -= piece.num_certain
        seq.num_drafted -= piece.num_drafted
        seq.num_pending -= piece.sampling is not None
        if outcome.error is not None:
            self._end(seq)
            return failure(seq, outcome.error, outcome.error_kind)
        seq.num_computed += piece.num_certain
        seq.num_scored = max(seq.num_scored, piece.start + len(piece.scored))
        if self.speculation is not None:
            self.speculation.learn(seq, piece.num_drafted, len(outcome.tokens) + outcome.is_complete)
        progress = self._append_sampled(seq, outcome.tokens, outcome.digests, outcome.is_complete)
        return replace(progress, first_scored=piece.start + 1, scores=outcome.scores) if outcome.scores else progress

    def _append_sampled(
        self,
        seq: Sequence,
        tokens: tuple[SampledToken, ...],
        digests: tuple[BlockDigest, ...] = (),
        is_complete: bool = False,
    ) -> SequenceUpdate:
        # With max_tokens=0 nothing is sampled after the prompt.
        is_last = seq.job.request.sampling.max_tokens == 0 and seq.num_computed == len(seq.tokens)
        if seq.is_unforked and (tokens or is_last or is_complete):
            return self._fork(seq, tokens, digests)
        first_index = seq.num_output
        finish = seq.finish_reason() if is_last else None
        kept: list[SampledToken] = []
        for token in tokens:
            seq.append(token)
            kept.append(token)
            finish = seq.finish_reason()
            if finish is not None:
                break
        if finish is None and is_complete:
            finish = FinishReason.STOP
        # Every kept token but the last one confirmed a guess, so the KV computed for that guess is valid.
        seq.num_computed += max(0, len(kept) - 1)
        self._publish(seq)
        handed_over = bool(kept) and isinstance(seq.job, PrefillJob) and finish is None
        if finish is not None or handed_over:
            self._end(seq)
        sampled, first = tuple(kept), tuple(kept) if handed_over else ()
        return SequenceUpdate(
            seq.job, seq.num_computed, seq.num_cached, first_index, sampled, digests, finish, handed_over,
            first_tokens=first,
        )  # fmt: skip

    def _fork(
        self, seq: Sequence, tokens: tuple[SampledToken, ...], digests: tuple[BlockDigest, ...]
    ) -> SequenceUpdate:
        """Fork a job of several choices after its first tokens: each choice that goes on becomes a sequence of its
        own."""
        self._publish(seq)
        progress, going_on = fork_update(seq, tokens, digests)
        if not going_on:
            self._end(seq)
            return progress
        for part in progress.branches:
            del self._by_key[part.key]
        fork_sequence(seq, going_on, self.pool, self._admitter.num_free_seats)
        for branch in (seq, *going_on[1:]):
            self._by_id[branch.id] = branch
            self._by_key[branch.key] = branch
        for other in going_on[1:]:
            (self._running if other.status is Status.RUNNING else self._waiting).add(other)
        return progress

    def _publish(self, seq: Sequence) -> None:
        num_full = seq.num_computed // self.pool.block_size
        if self.pool.is_caching and num_full > seq.table.num_published:
            self.pool.publish(seq.table, seq.hashes(num_full, self.pool.block_size))

    def _end(self, seq: Sequence) -> None:
        for key in seq.keys:
            del self._by_key[key]
        self._reserved_blocks.pop(seq.id, None)
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        elif seq.status is Status.PULLING:
            del self._pulling[seq.key]
        else:
            self._running.remove(seq)
        if seq.num_open_plans:
            seq.status = Status.CLOSING
            self._closing[seq.id] = seq
        else:
            self._close(seq)

    def _close(self, seq: Sequence) -> None:
        self.pool.release(seq.table)
        del self._by_id[seq.id]

    def _pull_need(self, job: Job) -> int:
        return pull_need(job, self.limits, self.pool.num_blocks, self.pool.block_size)


def _check_queues(queued: Many[Sequence], by_id: Collection[SeqId], by_key: Collection[JobKey]) -> None:
    assert sorted(s.id for s in queued) == sorted(by_id), "a sequence is in no queue or in two"
    keys = {key for s in queued if s.status is not Status.CLOSING for key in s.keys}
    assert keys == set(by_key), "keys and queues differ"


def _check_sequence(seq: Sequence, named: list[ScheduledSlice], num_held: int, pool: BlockPool) -> None:
    """Compare a sequence with the slices of open plans that name it, and with the `num_held` plans that its pull waits
    for."""
    assert seq.num_open_plans == len(named) + num_held, f"{seq!r}: open plans"
    if seq.status is Status.CLOSING:
        assert seq.num_open_plans, f"{seq!r} is closing without an open plan"
        return
    assert seq.num_in_flight == sum(s.num_certain for s in named), f"{seq!r}: tokens in flight"
    assert seq.num_drafted == sum(s.num_drafted for s in named), f"{seq!r}: guesses in flight"
    assert not any(s.num_drafted for s in named[:-1]), f"{seq!r} is planned beyond its guesses"
    assert seq.num_pending == sum(1 for s in named if s.sampling), f"{seq!r}: pending tokens"
    assert seq.num_computed <= len(seq.tokens), f"{seq!r}: computed more than is known"
    planned = seq.num_planned + seq.num_drafted
    assert planned <= len(seq.table) * pool.block_size, f"{seq!r}: planned beyond its blocks"
    if seq.status is Status.WAITING:
        assert not len(seq.table) and not planned, f"{seq!r} waits but holds something"
