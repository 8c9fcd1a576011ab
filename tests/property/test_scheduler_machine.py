"""Test the scheduler under random jobs, steps, faults and KV arrivals, with an executor that checks its plans."""

from __future__ import annotations

from dataclasses import replace
from operator import add

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, JobKey, SeqId
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob, Job, PrefillJob, ResumeJob
from tandem.core.slo import Slo
from tandem.core.worker_load import WorkerLoad
from tandem.kv.block_pool import BlockPool, Holder
from tandem.sched.budget.step_sizer import LEAST_TOKENS
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import PullAllocated, ScheduleResult, SequenceUpdate
from tandem.sched.state.sequence import Sequence, Status
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.sched.state.step_plan import ScheduledSlice, StepPlan
from tests.effort import effort
from tests.property.guesses import speculation
from tests.property.jobs import Shape, Witness, job_of, shapes
from tests.property.model import KVStore, ModelExecutor, chain_of

MAX_PROMPT, MAX_OUTPUT = 12, 10


class SchedulerMachine(RuleBasedStateMachine):
    depth = 1

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 3, 4]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, False]),
        num_host_slots=st.sampled_from([0, 1, 2, 3, 5, 20]),
        digests=st.booleans(),
        itl_s=st.sampled_from([0.0, 0.0, 1e-9, 0.005, 0.02, 1.0]),
        lane_preemptions=st.sampled_from([0, 1, 3]),
        batch_max_share=st.sampled_from([1.0, 1.0, 0.5, 0.2]),
        right=st.sampled_from([None, None, 1.0, 0.7, 0.2]),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        chunked: bool,
        caching: bool,
        num_host_slots: int,
        digests: bool,
        itl_s: float,
        lane_preemptions: int,
        batch_max_share: float,
        right: float | None,
        seed: int,
    ) -> None:
        self.limits = SchedulerLimits(
            # The configuration demands as much: a step has room for every running sequence.
            max_num_batched_tokens=max(budget, max_num_seqs),
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_PROMPT + MAX_OUTPUT - 2,
            enable_chunked_prefill=chunked,
            digest_handoffs=digests,
            targets=LatencyTargets(interactive=Slo(2.0, itl_s), batch=Slo(2.0, 2 * itl_s)),
            batch_max_share=batch_max_share,
            max_lane_preemptions=lane_preemptions,
            max_lane_pause_s=0.05,
        )
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching=caching, num_host_slots=num_host_slots)
        self.speculation = speculation(lambda: [w.job for w in self.live()], seed, right)
        self.scheduler = Scheduler(self.pool, self.limits, "model", self.speculation)
        self.store = KVStore(num_blocks, block_size, num_host_slots)
        self.executor = ModelExecutor(self.store)
        self.plans: list[StepPlan] = []
        self.last_load: tuple[tuple[object, ...], WorkerLoad] | None = None
        self.witnesses: dict[JobKey, Witness] = {}
        self.jobs: dict[JobKey, Job] = {}
        self.leases: dict[JobKey, tuple[BlockId, ...]] = {}
        self.num_announced: dict[JobKey, int] = {}
        self.grants: dict[JobKey, PullAllocated] = {}
        self.landing: list[tuple[BlockId, ...]] = []
        self.now = 0.0
        self.has_started = True

    # ---- what happens

    @rule(shape=shapes(MAX_PROMPT, MAX_OUTPUT))
    def add(self, shape: Shape) -> None:
        self.last_load = None
        job = job_of(shape, f"r{len(self.jobs)}")
        before = repr(self.scheduler), repr(self.pool)
        try:
            self.scheduler.add(job, self.now)
        except TandemError as refusal:
            assert refusal.kind in (ErrorKind.OVERLOADED, ErrorKind.CONTEXT_LENGTH)
            assert (repr(self.scheduler), repr(self.pool)) == before, "a refused job left something"
            return
        self.jobs[job.key] = job
        self.witnesses |= {key: Witness(job.for_choice(key.choice)) for key in job.keys}

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        self.last_load = None
        witness = data.draw(st.sampled_from(self.live()))
        try:
            self.scheduler.add(witness.job)
        except TandemError:
            return
        raise AssertionError("one key, two sequences")

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.last_load = None
        witness = data.draw(st.sampled_from(self.live()))
        self.stop(witness)
        job = self.job_with(witness)
        if self.has_ended(job):
            self.end_lease(job.key)
        assert not self.scheduler.cancel(witness.job.key)

    @precondition(lambda self: len(self.plans) < self.depth)
    @rule()
    def plan(self) -> None:
        self.take_plan()

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), fails=st.sampled_from([False] * 7 + [True]))
    def commit(self, data: st.DataObject, fails: bool) -> None:
        seqs = [s.seq for s in self.plans[0].slices]
        self.take_result({data.draw(st.sampled_from(seqs))} if fails and seqs else set())

    @precondition(lambda self: self.waiting_pulls())
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        self.last_load = None
        self.scheduler.on_producer_ready(data.draw(st.sampled_from(self.waiting_pulls())))

    @precondition(lambda self: self.writable_grants())
    @rule(data=st.data(), breaks=st.sampled_from([False, False, False, True]))
    def kv_arrives(self, data: st.DataObject, breaks: bool) -> None:
        self.last_load = None
        key = data.draw(st.sampled_from(self.writable_grants()))
        if breaks:
            self.break_off(key)
        else:
            self.arrive(key)

    @precondition(lambda self: self.landing)
    @rule()
    def abandoned_read_ends(self) -> None:
        self.last_load = None
        blocks = self.landing.pop(0)
        # It has written to the last moment, and what it wrote is of no use.
        self.store.spoil(blocks, 0, len(blocks) * self.block_size)
        self.pool.drop(blocks, Holder.READ)

    @precondition(lambda self: self.ended_leases())
    @rule(data=st.data())
    def consumer_is_done(self, data: st.DataObject) -> None:
        self.last_load = None
        self.end_lease(data.draw(st.sampled_from(self.ended_leases())))

    # ---- what must hold

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "has_started"):
            return
        self.scheduler.check()
        leased = [b for blocks in self.leases.values() for b in blocks]
        reading = [b for blocks in self.landing for b in blocks]
        copied = [source for plan in self.plans for source, _ in (*plan.copies, *plan.spills)]
        slots = [slot for plan in self.plans for slot in plan.host_slots]
        self.pool.check(self.scheduler.tables(), leased, reading, copied, slots)

    @invariant()
    def open_plans_own_their_blocks(self) -> None:
        """No block of an open plan is free, and nobody else may write what it writes."""
        if not hasattr(self, "has_started"):
            return
        writers: dict[BlockId, SeqId] = {}
        for plan in self.plans:
            for piece in plan.slices:
                for block in piece.blocks:
                    assert any(self.pool.holders(block)), f"block {block} of {plan} is free"
                for block in piece.blocks[piece.start // self.block_size :]:
                    assert writers.setdefault(block, piece.seq) == piece.seq, f"block {block} has two writers"
                    assert self.pool.holders(block)[0] == 1, f"block {block} is written and shared"
        copied = {source for plan in self.plans for source, _ in (*plan.copies, *plan.spills)}
        copied |= {block for plan in self.plans for _, block in plan.fills}
        assert all(any(self.pool.holders(block)) for block in copied), "a block is free that is to be copied"
        filled = {block for plan in self.plans for _, block in plan.fills}
        for grant in self.grants.values():
            assert not (writers.keys() | filled) & set(grant.table.ids()[grant.num_hit_blocks :])

    @invariant()
    def offered_prefills_run_on(self) -> None:
        if not hasattr(self, "has_started"):
            return
        for key in self.leases:
            seq = next((s for k in self.jobs[key].keys if (s := self.scheduler.state.by_key.get(k)) is not None), None)
            assert seq is None or seq.status is Status.RUNNING, f"{seq!r} has a lease, but was preempted"

    def teardown(self) -> None:
        """Nothing new comes and nothing fails: then everything ends, and within a bound that is computed here.

        The oldest sequence that runs gets a token's KV in every step in which it is planned. It is not planned only
        while a younger one with an open plan holds its block: at most until that one needs a block itself, so for
        `block_size` tokens, `depth` steps each. A sequence may be recomputed once it is the oldest, and then runs to
        its end. So each takes at most twice its length, and the wait between.
        """
        if not hasattr(self, "has_started"):
            return
        longest = self.limits.max_model_len
        bound = (1 + len(self.live())) * (2 * longest + self.block_size + 2) * self.depth
        for _ in range(bound):
            self.turn()
            if not self.live():
                break
        assert not self.live(), f"after {bound} steps there are {self.live()} in {self.scheduler!r}"
        while self.plans or self.leases or self.landing:
            self.turn()
        assert not self.scheduler.num_sequences and not any(self.scheduler.load().lane_tokens)
        assert self.pool.num_free == self.pool.num_blocks, repr(self.pool)

    # ---- how

    def turn(self) -> None:
        """One step in which every outside party does its part."""
        while self.landing:
            self.abandoned_read_ends()
        for key in self.ended_leases():
            self.end_lease(key)
        for key in self.waiting_pulls():
            self.scheduler.on_producer_ready(key)
        for key in self.writable_grants():
            self.arrive(key)
        while len(self.plans) < self.depth and self.take_plan():
            pass
        if self.plans:
            self.take_result(set())
        self.books_balance()
        self.open_plans_own_their_blocks()

    def live(self) -> list[Witness]:
        return [w for w in self.witnesses.values() if w.end is None]

    def waiting_pulls(self) -> list[JobKey]:
        return [s.keys[-1] for s in self.scheduler.state.waiting if isinstance(s.job, ResumeJob) and not s.may_start]

    def writable_grants(self) -> list[JobKey]:
        """The pulls whose reads may write by now: the old content of their blocks has been copied to host memory."""
        fresh = {key: grant.table.ids()[grant.num_hit_blocks :] for key, grant in self.grants.items()}
        return sorted(key for key, blocks in fresh.items() if not self.pool.is_copied(blocks))

    def ended_leases(self) -> list[JobKey]:
        return [key for key in self.leases if self.has_ended(self.jobs[key])]

    def job_with(self, witness: Witness) -> Job:
        """The job that a choice came with."""
        return next(job for job in self.jobs.values() if witness.job.key in job.keys)

    def has_ended(self, job: Job) -> bool:
        return all(self.witnesses[key].end is not None for key in job.keys)

    def take_plan(self) -> bool:
        ready = [s for s in self.scheduler.state.running if s.is_schedulable and s.num_remaining == 1]
        num_yields = {s: s.num_yields for s in self.scheduler.state.running}
        free = self.pool.num_free
        sizes = {s.id: len(s.table) for s in self.scheduler.state.running}
        num_computed = {s: s.num_computed for s in self.scheduler.state.running}
        num_counted = self.counted_yields()
        before = [(s, s.num_open_plans) for s in self.scheduler.state.running]
        prompts = [s for s in self.scheduler.state.running if s.is_schedulable and s.num_remaining > 1]
        owed = [(s, s.num_remaining) for s in prompts[:1]]
        queued = list(self.scheduler.state.waiting)
        waiting = [s for s in queued if s.may_start]
        planned = self.scheduler.plan(self.now)
        self.check_victims(before, num_yields)
        # Promoted ones are among the most urgent.
        most_urgent = min((s.order[0] for s in waiting), default=Lane.BATCH)
        yielded = [s for s, number in num_yields.items() if s.num_yields > number]
        assert planned.num_yielded == len(yielded) == sum(s.num_yields - number for s, number in num_yields.items())
        may_yield = {
            s
            for s, number in num_yields.items()
            if number < self.limits.max_lane_preemptions and s.order[0] > most_urgent
        }
        assert may_yield.issuperset(yielded)
        given_up = [(1, num_computed[s], sizes[s.id]) for s in yielded]
        counted = tuple(after - before for before, after in zip(num_counted, self.counted_yields(), strict=True))
        assert counted == tuple(map(sum, zip((0, 0, 0), *given_up, strict=True)))
        started = {start.key for start in planned.starts}
        assert not [s for s in yielded if s.status is not Status.WAITING or s.key in started]
        self.check_batch_limit(planned, [s for s in waiting if s.key in started])
        since = self.now - self.limits.max_lane_pause_s
        paused_at = self.scheduler.state.paused_at
        late = [s for s in waiting if s not in yielded and paused_at.get(s.id, self.now) <= since]
        assert not [s for s in late if not s.is_promoted], f"{late} wait too long"
        if self.limits.enable_chunked_prefill:
            # Some have been promoted.
            oldest = min((s.order for s in queued), default=(9, 0, 0))
            self.check_share_of_oldest(
                planned, [pair for pair in owed if pair[0].order < oldest], {s.id for s in ready}
            )
        for offer in (start for start in planned.starts if start.leased):
            assert offer.key not in self.leases
            self.leases[offer.key] = offer.leased
            self.num_announced[offer.key] = 0
        for grant in planned.pulls:
            self.grants[grant.key] = grant
            known = self.witnesses[grant.key].job.num_known_tokens
            assert grant.num_known_blocks == -(-known // self.block_size) <= len(grant.table.ids())
            assert grant.num_hit_blocks * self.block_size < known, "the last token's block is always read"
        if planned.step is not None:
            self.plans.append(planned.step)
            self.check_plan(planned.step)
            self.check_decodes_first(planned, [s for s in ready if s not in yielded], free, may_yield)
            self.check_guesses(planned.step, sizes)
        return planned.step is not None

    def check_batch_limit(self, planned: ScheduleResult, started: list[Sequence]) -> None:
        """A batch prompt starts alone, or beside others within the limit."""
        batch = [s for s in started if s.order[0] == Lane.BATCH and s.status is Status.RUNNING]
        if batch and self.limits.batch_max_share < 1:
            pulls = [self.scheduler.state.pulling[grant.key] for grant in planned.pulls]
            granted = sum(self.scheduler.state.num_seats_of(s) for s in pulls if s.lane == Lane.BATCH)
            used = self.scheduler.state.lane_uses()[Lane.BATCH].num_seats - granted
            most = self.limits.batch_max_share * self.limits.max_num_seqs
            most = max(most, self.scheduler.state.num_seats_of(batch[0]))
            assert used <= most, f"{batch} exceed the limit"

    def counted_yields(self) -> tuple[int, int, int]:
        """Return how many sequences have yielded to those that are here and have not reported it, and what they gave
        up."""
        totals = (0, 0, 0)
        for seq in self.scheduler.state.by_id.values():
            for lane, *counts in seq.preemption.yields if seq.preemption is not None else ():
                assert lane > seq.order[0], f"a sequence in {lane} has yielded to {seq!r}"
                totals = tuple(map(add, totals, counts))  # type: ignore[assignment]
        return totals

    def check_victims(self, before: list[tuple[Sequence, int]], num_yields: dict[Sequence, int]) -> None:
        """Whoever is preempted is the youngest that may be."""
        victims = [s for s, _ in before if s.status is Status.WAITING]
        spared = [s for s, num_open in before if s.status is Status.RUNNING and not num_open]
        for victim in victims:
            assert not isinstance(victim.job, PrefillJob)
            younger = [s for s in spared if s.order > victim.order and not isinstance(s.job, PrefillJob)]
            if victim.num_yields > num_yields[victim]:
                younger = [s for s in younger if num_yields[s] < self.limits.max_lane_preemptions]
            assert not younger, f"{victim!r} gave way, not {younger}"

    def check_plan(self, plan: StepPlan) -> None:
        limits = self.limits
        assert len(plan.slices) + plan.num_host_copies > 0 and len(plan.slices) <= limits.max_num_seqs
        assert len({s.seq for s in plan.slices}) == len(plan.slices)
        for piece in plan.slices:
            seq = self.scheduler.state.by_id[piece.seq]
            assert not (isinstance(seq.job, PrefillJob) and piece.chained), f"{plan}: a prefill decodes"
        over = plan.num_tokens - limits.max_num_batched_tokens
        if limits.enable_chunked_prefill:
            assert over <= 0, f"{plan} exceeds the budget"
            return
        largest = max((s.num_tokens for s in plan.slices), default=0)
        assert over < largest, f"{plan}: more than one prompt exceeds the budget"
        for piece in plan.slices:
            seq = self.scheduler.state.by_id[piece.seq]
            certain = piece.stop - piece.num_drafted
            assert piece.num_certain == 1 or certain == len(seq.tokens), f"{plan} cuts a prompt in pieces"

    def check_share_of_oldest(
        self, planned: ScheduleResult, oldest: list[tuple[Sequence, int]], decodes: set[SeqId]
    ) -> None:
        """Whatever else there is to do, the oldest prompt gets half of what decodes leave, or of the least."""
        for seq, num_remaining in oldest:
            if seq.status is not Status.RUNNING:
                continue
            slices = planned.step.slices if planned.step is not None else ()
            left = self.limits.max_num_batched_tokens - sum(1 for s in slices if s.seq in decodes)
            half = left // 2 if not self.limits.targets.interactive.itl_s else min(left, LEAST_TOKENS) // 4
            share = sum(s.num_tokens for s in slices if s.seq == seq.id)
            assert share >= min(num_remaining, max(1, half), left), f"{planned.step} forgets {seq!r}"

    def check_decodes_first(
        self, planned: ScheduleResult, ready: list[Sequence], free: int, may_yield: set[Sequence]
    ) -> None:
        """Where there is room for all, every decode is in the plan, ahead of all prompts, but for those that are to
        yield and are in open plans: the last of those that may."""
        assert planned.step is not None
        if free < len(ready):
            return
        in_plan = {s.seq for s in planned.step.slices}
        staying = [s for s in ready if s.id in in_plan]
        names = [s.seq for s in planned.step.slices][: len(staying)]
        assert names == [s.id for s in staying], f"{planned.step} has decodes behind prompts"
        missing = [s for s in ready if s.id not in in_plan]
        assert may_yield.issuperset(missing), f"{planned.step} lacks a decode of {missing}"
        later = [s for s in staying if s in may_yield and missing and s.order > missing[0].order]
        assert not later, f"{planned.step} has decodes of {later}, not of {missing[0]!r}"

    def check_guesses(self, plan: StepPlan, sizes: dict[SeqId, int]) -> None:
        """They take no room that somebody may want next, and none of them is beyond a sequence's last token."""
        rows = 0
        for piece in plan.slices:
            seq = self.scheduler.state.by_id[piece.seq]
            rows += piece.num_tokens if piece.num_certain == 1 else 0
            if not piece.num_drafted:
                continue
            assert not piece.chained and not isinstance(seq.job, PrefillJob) and piece.sampling is not None
            assert piece.sampling.index + piece.num_drafted < seq.job.request.sampling.max_tokens
            certain = -(-(piece.stop - piece.num_drafted) // self.block_size)
            if len(seq.table) > max(certain, sizes.get(seq.id, 0)):
                waiting = sum(-(-len(s.tokens) // self.block_size) + 1 for s in self.scheduler.state.waiting)
                assert self.pool.num_free >= len(self.scheduler.state.running) + waiting, f"{plan} takes others' room"
        if plan.num_drafted:
            assert self.speculation is not None
            assert rows <= self.speculation._max_batch_tokens, f"{plan} guesses in a batch that is large enough"

    def take_result(self, failing: set[SeqId]) -> None:
        plan = self.plans.pop(0)
        self.check_digests(plan)
        result = self.executor.execute(plan, failing)
        for progress in self.scheduler.commit(result):
            self.record(progress)
        seconds = 0.001 * (1 + plan.num_tokens) * (1 + plan.number % 7 // 6 * 30)
        self.now += seconds
        record = self.scheduler.pacer.measured(result, seconds)
        assert record.has_failed == any(s.error is not None for s in result.slices)
        assert record.features.num_prefill_tokens + record.features.num_decode_seqs == plan.num_tokens
        self.check_load_key(plan)

    def check_load_key(self, plan: StepPlan) -> None:
        """An equal key after two commits with nothing but plans between them means an equal load."""
        key, load = self.scheduler.load_key(plan), self.scheduler.load()
        if self.last_load is not None and self.last_load[0] == key:
            assert self.last_load[1] == load
        self.last_load = None if key is None else (key, load)

    def check_digests(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            if not piece.digest_blocks:
                continue
            assert self.limits.digest_handoffs
            assert set(piece.digest_blocks) <= set(piece.blocks[: self.num_complete(piece)])

    def num_complete(self, piece: ScheduledSlice) -> int:
        seq = self.scheduler.state.by_id[piece.seq]
        return len(piece.blocks) if piece.stop == len(seq.tokens) else piece.stop // self.block_size

    def record(self, progress: SequenceUpdate) -> None:
        if progress.scores:
            for key in progress.job.keys:
                if self.witnesses[key].end is None:
                    self.witnesses[key].scored(progress.first_scored, progress.scores)
        if isinstance(progress.job, PrefillJob) and progress.error is None:
            self.check_offer(progress)
        for part in progress.parts:
            if part.tokens or part.has_ended:
                self.record_part(part, self.witnesses[part.key])

    def record_part(self, part: SequenceUpdate, witness: Witness) -> None:
        for i, token in enumerate(part.tokens):
            witness.token(part.first_index + i, token.id)
        if part.error is not None:
            witness.failed()
        elif part.handed_over:
            witness.finished(None)
        elif part.finish is not None:
            witness.finished(part.finish)

    def check_offer(self, progress: SequenceUpdate) -> None:
        """What may be announced now is computed, and digested in order, each block once."""
        blocks = self.leases[progress.key]
        size = self.block_size
        num = len(blocks) if progress.handed_over else progress.num_computed // size
        assert self.num_announced[progress.key] <= num
        if self.limits.digest_handoffs and progress.finish is None:
            fresh = blocks[self.num_announced[progress.key] : num]
            assert tuple(d.block for d in progress.digests) == fresh
            assert all(d.heads == self.store.digest(d.block) for d in progress.digests)
        self.num_announced[progress.key] = num
        first = [t.id for t in progress.first_tokens]
        assert first == ([t.id for t in self.first_tokens(progress.key)] if progress.handed_over else [])
        self.store.read(blocks, progress.num_computed if progress.handed_over else num * size)

    def arrive(self, key: JobKey) -> None:
        if not self.witnesses[key].expected:
            self.break_off(key)  # its source draws nothing, so it hands nothing over
            return
        grant, job = self.grants.pop(key), self.jobs[key]
        start = grant.num_hit_blocks * self.block_size
        known = [*job.request.prompt_tokens, *job.output_tokens]
        # The step that fills blocks of the prefix from host memory may not have run yet.
        filled = {block for plan in self.plans for _, block in plan.fills}
        if filled.isdisjoint(grant.table.ids()):
            assert self.store.read(grant.table.ids(), start) == chain_of(known[:start])
        self.store.receive(grant.table.ids(), start, known)
        self.record(self.scheduler.kv_arrived(key, self.first_tokens(key), 0, len(known)))

    def first_tokens(self, name: JobKey) -> tuple[SampledToken, ...]:
        """What a source draws for each choice of a job, those that were ended included."""
        job = self.jobs[name]
        return tuple(SampledToken(self.witnesses[key].expected[len(job.output_tokens)]) for key in job.keys)

    def break_off(self, key: JobKey) -> None:
        """A pull is given up while a read is under way."""
        grant = self.grants[key]
        blocks = grant.table.ids()[grant.num_hit_blocks : grant.num_known_blocks]
        self.pool.retain(blocks, Holder.READ)
        self.landing.append(blocks)
        for witness in [self.witnesses[k] for k in self.jobs[key].keys if self.witnesses[k].end is None]:
            self.stop(witness)

    def stop(self, witness: Witness) -> None:
        assert self.scheduler.cancel(witness.job.key)
        witness.cancelled()
        job = self.job_with(witness)
        if self.has_ended(job):
            self.grants.pop(job.key, None)

    def end_lease(self, key: JobKey) -> None:
        blocks = self.leases.pop(key, None)
        if blocks is not None:
            self.pool.drop(blocks, Holder.LEASE)


class DeepSchedulerMachine(SchedulerMachine):
    """The next step is planned while one runs."""

    depth = 2


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = effort(120, 70)
TestDeepScheduler = pytest.mark.slow(DeepSchedulerMachine.TestCase)
TestDeepScheduler.settings = effort(120, 70)


def test_a_pull_may_arrive_before_the_blocks_that_it_hit_are_back_from_host_memory() -> None:
    machine = SchedulerMachine()
    machine.start(
        num_blocks=5,
        block_size=1,
        budget=5,
        max_num_seqs=1,
        chunked=True,
        caching=True,
        num_host_slots=2,
        digests=False,
        itl_s=0.0,
        lane_preemptions=0,
        batch_max_share=1.0,
        right=None,
        seed=0,
    )
    first = Shape(kind=GenerateJob, length=3, shared=3, branch=0, max_tokens=0)
    machine.add(first)
    machine.turn()
    # It takes blocks of the first, whose content goes to host memory, and frees them without content.
    machine.add(replace(first, length=4, shared=0))
    machine.take_plan()
    machine.take_result({piece.seq for piece in machine.plans[0].slices})
    machine.add(replace(first, kind=ResumeJob, max_tokens=1))
    (key,) = machine.waiting_pulls()
    machine.scheduler.on_producer_ready(key)
    machine.take_plan()
    assert machine.plans[0].fills and machine.writable_grants() == [key]
    machine.arrive(key)
    machine.teardown()
