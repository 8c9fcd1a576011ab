"""Decide what each step of a worker computes. The scheduler runs no model, transfers no KV and reads no clock: callers
pass the time.

There is no prefill phase and no decode phase, only sequences with tokens still to compute. A step first computes one
token of every decoding sequence, and then fills the rest of its token budget with prefill chunks (Sarathi-Serve, OSDI
2024). `budget.step_sizer` decides how large this rest is, `budget.prefill_sharing` how prompts share it. Sequences are
planned in their order of service: lane, priority, arrival. Where KV blocks are missing, running sequences that are not
in the plan yet are preempted, the last in this order first, and are computed again later. Before a plan, running
sequences may also be preempted so that waiting ones of more urgent lanes get their seats and blocks
(`phases.lane_preemption`). A plan is open until its result is committed. Several plans may be open; they are committed
in the order in which they were made.

`state.scheduler_state` owns the sequences; the phases of a step are functions over it, in `phases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import chain

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken, TokenRun
from tandem.core.ids import BlockHash, BlockId, HostSlot, JobKey, SeqId
from tandem.core.request import Job, ResumeJob
from tandem.core.request_stages import WaitCause
from tandem.core.worker_load import WorkerLoad
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS
from tandem.kv.hashing import root_hash
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.phases.admit_waiting import admissible, admit_waiting, startable
from tandem.sched.phases.apply_results import append_sampled, apply_slice
from tandem.sched.phases.decode_run import DecodeRun, advance, forecast
from tandem.sched.phases.job_admission import RejectedJobs, check_job
from tandem.sched.phases.lane_preemption import may_preempt, preempt_for_urgent
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.phases.slices import assign_prefill_budget, plan_decodes, plan_prefills
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.state.backlog import check_backlog, horizon_tokens, queued_tokens
from tandem.sched.state.limits import BlockDemand, SchedulerLimits
from tandem.sched.state.schedule_result import ScheduleResult, SequenceUpdate
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import Sequence, Status
from tandem.sched.state.step_plan import PrefixBlock, StepPlan, StepResult


class Scheduler:
    """Decide for each step which sequences of a worker compute how many tokens, and allocate their KV blocks.

    A caller adds jobs with `add`, gets the next step from `plan`, has it computed, and passes the result to `commit`.
    The scheduler owns the `SchedulerState` with all sequences. `pool`: the KV blocks of the worker. `model_fingerprint`
    becomes part of the block hashes. Without `speculation` a step samples at most one token of each choice. The module
    docstring describes the order of service.
    """

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, model_fingerprint: str, speculation: Speculation | None = None
    ) -> None:
        self.pool = pool
        self.state = SchedulerState(pool, limits)
        self.pacer = StepSizer(limits.max_num_batched_tokens)
        self.speculation = speculation
        self._fingerprint = model_fingerprint
        self._rejected_jobs = RejectedJobs()
        self._num_arrived = 0
        self._last_prefix_plan = -2

    # ---- jobs

    def add(self, job: Job, now: float = 0.0) -> None:
        """Add a new job to the waiting ones. `now`: the time of its arrival, in seconds of the caller's clock.

        Raises TandemError, and adds nothing, if the job can never run on this worker, if it was accepted already, or,
        with the kind OVERLOADED, if the worker has no room for it now.
        """
        if any(key in self.state.by_key for key in job.keys):
            raise TandemError(ErrorKind.INVALID_REQUEST, f"job {job.key} was accepted already")
        check_job(job, self.state, self._rejected_jobs, now)
        root = root_hash(self._fingerprint, self.pool.block_size, job.request.cache_salt)
        seq = Sequence(SeqId(self._num_arrived), job, root, self._num_arrived, now)
        # Hash the prompt now, rather than between two steps or between a hand-off and the first read of its blocks.
        seq.reusable(self.pool.block_size)
        self._await_prefix(seq)
        if not seq.is_pull:
            load = self.load()
            check_backlog(seq, self.pool, load)
            self._note_first_wait(seq, load.lane_tokens[seq.lane], now)
        self._num_arrived += job.num_choices
        self.state.enqueue(seq)

    def cancel(self, key: JobKey) -> bool:
        """Cancel one choice of a job. Returns False if this worker has no such choice, for example because it has
        ended.

        The KV blocks of a sequence are freed when its last choice has ended: immediately, or, if open plans contain the
        sequence, when the last of these plans is committed.
        """
        seq = self.state.by_key.get(key)
        if seq is None:
            return False
        self.state.finish_choice(seq, key)
        return True

    def release_migrated(self, key: JobKey) -> SequenceUpdate:
        """End the sequence of a choice that continues on another worker, and return its last update, in which
        `handed_over` is set. Raises KeyError if this worker has no such choice."""
        seq = self.state.by_key[key]
        self.state.finish(seq)
        return SequenceUpdate(seq.job, seq.num_computed, seq.num_cached, seq.num_output, handed_over=True)

    def on_producer_ready(self, key: JobKey, now: float = 0.0) -> None:
        """Record that the producer of a `ResumeJob` has begun to offer its KV. Before this call the job waits; after it
        the job may get blocks.

        `key`: any choice of the job; KeyError if this worker does not have it. `now`: the present time, in seconds on
        the clock of `add`.
        """
        seq = self.state.by_key[key]
        if not seq.may_start and self.state.held_back_by is not None:
            seq.wait_for(self.state.held_back_by, now)
        seq.may_start = True

    def awaited_prefix(self, key: JobKey) -> Many[BlockHash]:
        """Return the block hashes of the prompt prefix that a job waits for while it is fetched from another worker or
        from files. The result is empty if the job waits for no prefix.

        The job does not start before `on_prefix_ready` is called. `key`: any choice of the job.
        """
        seq = self.state.by_key[key]
        return seq.reusable(self.pool.block_size)[: seq.num_awaited_blocks]

    def on_prefix_ready(self, key: JobKey, now: float) -> None:
        """End the wait of a job for its prefix, whether or not the prefix could be fetched. The next plan may start the
        job, which computes all tokens that are not in the prefix cache.

        `key`: any choice of the job. `now`: the present time, in seconds on the clock of `add`.
        """
        seq = self.state.by_key[key]
        seq.may_start = True
        seq.num_awaited_blocks = 0
        seq.wait_for(self.state.held_back_by or WaitCause.STEP, now)

    def kv_arrived(
        self, key: JobKey, first_tokens: tuple[SampledToken, ...], num_cached: int, num_computed: int
    ) -> SequenceUpdate:
        """Move a sequence whose KV was pulled to the running ones, and return its update. Call this once the KV of its
        first `num_computed` tokens is complete and verified.

        - `key`: the first choice of its job; KeyError for any other.
        - `first_tokens`: tokens that the producer sampled. For a job of several choices, they are the next token of
          each choice. For a job of one choice, they are its last output tokens, the last of which is at position
          `num_computed`; tokens that the job knows already are skipped. Empty for a sequence that the producer had
          preempted: this worker then computes the known tokens that have no KV.
        - `num_cached`: number of prompt tokens that were prefix-cache hits at the producer.
        """
        seq = self.state.start_pulled(key)
        seq.num_cached = num_cached
        num_known = len(seq.tokens)
        num_hits = seq.table.num_published * self.pool.block_size
        most = num_known if first_tokens else num_known - 1  # one token at least is computed, from which to sample
        seq.num_computed = max(min(most, num_computed), num_hits)
        num_new = num_computed + 1 - num_known
        fresh = first_tokens if seq.is_unforked else first_tokens[len(first_tokens) - max(0, num_new) :]
        preemption = seq.take_preemption()
        update = append_sampled(self.state, seq, fresh)
        # The gateway has these tokens already, so the next one reports what yielded.
        seq.preemption = preemption
        return update

    # ---- one step

    def plan(self, now: float = 0.0, prefix_blocks: Many[PrefixBlock] = ()) -> ScheduleResult:
        """Plan the next step, allocate blocks to the sequences and pulls that it starts, and return what was decided.

        `now`: the present time, in seconds on the clock of `add`.

        `prefix_blocks`: blocks that other workers fetch as a remote prefix, and whose checksums (digests) they need. A
        plan that computes no tokens digests them, so that a consumer need not wait until a long step is over. While
        sequences have tokens to compute, at most every second plan is of this kind.
        """
        state = self.state
        state.now = now
        builder = PlanBuilder(state.limits)
        if prefix_blocks and state.num_plans > self._last_prefix_plan + 1:
            return ScheduleResult(self._open_plan(builder, prefix_blocks))
        yielding = preempt_for_urgent(state, builder)
        ready = [seq for seq in state.running if seq.is_schedulable and seq.id not in yielding]
        plan_decodes(state, builder, ready)
        started = [seq for seq in ready if seq.num_remaining > 1 and seq.status is Status.RUNNING]
        may_start = builder.num_preempted == 0 or not (builder.slices or started)
        assign_prefill_budget(state, builder, self.pacer, started, startable(state, builder) if may_start else (), now)
        if may_start:
            admit_waiting(state, builder)
        if started:
            plan_prefills(state, builder, started)
        if self.speculation is not None:
            self.speculation.extend(state, builder)
        step = self._open_plan(builder, prefix_blocks)
        return builder.build(step)

    def commit(self, result: StepResult, now: float = 0.0) -> list[SequenceUpdate]:
        """Apply the result of the oldest open plan. Returns one update for each sequence of the plan that had not ended
        before.

        `now`: the present time, in seconds on the clock of `add`. Tokens that were sampled after the end of a sequence
        are dropped. Raises ValueError for the result of any other plan.
        """
        state = self.state
        plan = state.close_plan(result.number)
        if plan.copies:
            self.pool.drop([source for source, _ in plan.copies], Holder.COPY)
        if plan.num_host_copies:
            self.pool.end_copies(plan.spills, plan.fills)
        progress: list[SequenceUpdate] = []
        for piece, outcome in zip(plan.slices, result.slices, strict=True):
            seq = state.by_id[piece.seq]
            seq.num_open_plans -= 1
            if seq.status is not Status.CLOSING:
                progress.append(apply_slice(state, self.speculation, seq, piece, outcome))
                if seq.job.request.retain_s and piece.start < seq.num_prompt <= seq.num_computed:
                    self._retain_prompt(seq, now)
        state.release_finished()
        return progress

    def run(self, limit: int) -> DecodeRun | None:
        """Forecast the next plans, at most `limit`, as long as each plan decodes one token of every running sequence
        and does nothing else.

        Returns None if the next plan is not of this kind, if a plan is open, or if speculative decoding is on. Changes
        nothing. The result is for `commit_run`, and is invalid after any other call that changes the scheduler.
        """
        state = self.state
        if state.open_plans or self.pool.has_copies or self.speculation is not None:
            return None
        if state.num_free_seats > 0 and (state.paused_at or next(admissible(state), None) is not None):
            return None
        if may_preempt(state):
            return None
        return forecast(state.num_plans, limit, tuple(state.running), self.pool, state.limits)

    def commit_run(self, run: DecodeRun, sampled: Many[Many[int]]) -> list[TokenRun]:
        """Plan and commit the first steps of a run in one call, and return the sampled tokens, one `TokenRun` per
        sequence.

        `run`: the result of the method `run`. `sampled`: the ids of the sampled tokens, one list per sequence in the
        order of `run.seqs`. All lists have the same length, which is the number of steps. The step-time model learns
        nothing. Raises ValueError if the lists do not fit the run, if a plan is open, or if `run` does not begin with
        the next plan.
        """
        if self.state.open_plans or run.number != self.state.num_plans:
            raise ValueError(f"a run from plan {run.number} on, but the next is {self.state.num_plans}")
        updates = advance(run, [self.state.by_id[seq] for seq in run.seqs], sampled, self.pool)
        # The numbers of these plans are used up, though none was opened.
        self.state.num_plans += len(sampled[0])
        return updates

    # ---- statistics and invariants

    @property
    def num_open_plans(self) -> int:
        """Count the plans that were made and not committed yet."""
        return len(self.state.open_plans)

    @property
    def num_sequences(self) -> int:
        """Count the sequences of this worker, including those that have ended and are still in an open plan."""
        return len(self.state.by_id)

    def num_output(self, key: JobKey) -> int:
        """Count the output tokens of a choice, including those of earlier attempts; 0 for an unknown choice."""
        return seq.num_output if (seq := self.state.by_key.get(key)) is not None else 0

    def load(self, *, draining: bool = False, num_remote_hit_tokens: int = 0) -> WorkerLoad:
        """Return the worker's load report for routers. Sequences whose KV is being pulled count as running.

        `draining` and `num_remote_hit_tokens` are copied into the report.
        """
        pool, state, pacer, drafts = self.pool, self.state, self.pacer, self.speculation
        queued, longest = queued_tokens(chain(state.running, state.waiting), pool.block_size)
        lane_blocks, lane_seqs = zip(*state.lane_uses(with_reservations=True), strict=True)
        return WorkerLoad(
            num_running=state.num_seated,
            num_waiting=len(state.waiting),
            num_queued_tokens=queued.by_lane[-1],
            lane_tokens=queued.by_lane,
            lane_longest=longest.by_lane,
            size_tokens=queued.by_size,
            size_longest=longest.by_size,
            lane_seqs=lane_seqs,
            lane_blocks=lane_blocks,
            lane_paused=state.lane_paused(),
            num_host_blocks=pool.host.num_held,
            num_horizon_tokens=horizon_tokens(state.limits, pacer.model.published or pacer.model.cost),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_leased_blocks=pool.num_leased,
            num_reserved_blocks=state.num_reserved,
            draining=draining,
            num_drafted_tokens=0 if drafts is None else drafts.num_drafted,
            num_accepted_tokens=0 if drafts is None else drafts.num_accepted,
            num_steps_over_target=pacer.num_steps_over_target,
            num_remote_hit_tokens=num_remote_hit_tokens,
            num_prefill_tokens=pacer.num_prefill_tokens,
            num_decode_tokens=pacer.num_decode_tokens,
        )

    def load_key(self, plan: StepPlan) -> tuple[object, ...] | None:
        """Return a value that is equal after two commits only if `load` is equal too, provided that in between plans
        were made and committed and nothing else was called; costs a fraction of `load`.

        `plan`: the plan that was committed last. Returns None where `load` may have changed in ways that no such value
        shows: the plan computed several tokens of a sequence, sequences wait, or tokens are drafted.
        """
        pool, state, pacer = self.pool, self.state, self.pacer
        if self.speculation is not None or state.waiting or any(piece.num_tokens > 1 for piece in plan.slices):
            return None
        return (
            state.num_seated,
            pool.num_free,
            pool.num_leased,
            state.num_reserved,
            pacer.num_steps_over_target,
            pacer.num_prefill_tokens,
            pacer.model.published or pacer.model.cost,
        )

    def demand(self) -> BlockDemand:
        """Return how many free blocks this worker's sequences may need soon. New leases and remote prefix fetches must
        leave these blocks free."""
        return BlockDemand(len(self.state.running), self.state.num_reserved, self.state.largest_reservation)

    def tables(self) -> Iterator[BlockTable]:
        """Yield the block tables of all sequences, for `BlockPool.check`."""
        return (seq.table for seq in self.state.by_id.values())

    def copied_blocks(self) -> Iterator[BlockId]:
        """Yield the source block of each copy that an open plan makes, within the pool or to host memory, once per
        copy; for `BlockPool.check`."""
        return (source for plan in self.state.open_plans.values() for source, _ in chain(plan.copies, plan.spills))

    def copied_slots(self) -> Iterator[HostSlot]:
        """Yield the host slot of each copy to or from host memory that an open plan makes, once per copy; for
        `BlockPool.check`."""
        return (slot for plan in self.state.open_plans.values() for slot in plan.host_slots)

    def check(self) -> None:
        """Check the counters of the state against a recount from its sequences and open plans. Raises AssertionError,
        which names the first difference."""
        self.state.check()

    def __repr__(self) -> str:
        return f"<scheduler {self.state}>"

    def _retain_prompt(self, seq: Sequence, now: float) -> None:
        """Protect the cached blocks of a prompt that was computed: for `retain_s` seconds (a field of its request) from
        `now` on, they are evicted only after all other blocks."""
        request, block_size = seq.job.request, self.pool.block_size
        hashes = seq.hashes(seq.num_prompt // block_size, block_size)
        most = request.max_retained_tokens and max(1, request.max_retained_tokens // block_size)
        self.pool.keep_cached(request.tenant, hashes, now + request.retain_s, most)

    def _note_first_wait(self, seq: Sequence, num_tokens_ahead: int, now: float) -> None:
        """Record what a new prompt waits for, until a plan finds another cause. `num_tokens_ahead`: queued prompt
        tokens of its lane and more urgent ones. Records nothing where no cause is known: the prompt then waits at most
        for the end of the step that runs now."""
        seq.num_tokens_ahead = num_tokens_ahead
        if seq.num_awaited_blocks:
            seq.wait_for(WaitCause.REMOTE_PREFIX, now)
        elif self.state.held_back_by is not None:
            seq.wait_for(self.state.held_back_by, now)
        elif num_tokens_ahead:
            seq.wait_for(WaitCause.PROMPTS_AHEAD, now)

    def _await_prefix(self, seq: Sequence) -> None:
        """Keep a new sequence from starting until `on_prefix_ready`, if more of its prefix can be fetched, from another
        worker or from files, than is cached on this worker. Until then the prefix to fetch counts as cached."""
        if isinstance(seq.job, ResumeJob) or not self.pool.is_caching:
            return
        prefix = seq.job.prefix
        hashes = seq.reusable(self.pool.block_size)
        num_remote = 0 if prefix is None else min(prefix.num_blocks, MAX_REMOTE_PREFIX_BLOCKS)
        num_filed = self.pool.count_reachable(hashes) if self.pool.host.in_files else 0
        hashes = hashes[: max(num_remote, num_filed)]
        if self.pool.count_hits(hashes) < len(hashes):
            seq.may_start = False
            seq.num_awaited_blocks = len(hashes)

    def _open_plan(self, builder: PlanBuilder, prefix_blocks: Many[PrefixBlock]) -> StepPlan | None:
        """Turn a builder into an open plan and return the plan; None where there is nothing to compute, copy or
        digest."""
        self.pool.copy_ahead()
        self.pacer.preempted(builder.num_preempted, len(builder.yielded))
        spills, fills = self.pool.host.take_copies()
        number = self.state.num_plans
        digests = () if builder.slices else tuple(prefix_blocks[: builder.num_digests_left])
        if digests:
            self._last_prefix_plan = number
        if not (builder.slices or spills or fills or digests):
            return None
        step = StepPlan(number, tuple(builder.slices.values()), tuple(builder.copies), spills, fills, digests)
        self.state.open_plan(step, builder.pulls)
        self.pacer.planned(step)
        return step
