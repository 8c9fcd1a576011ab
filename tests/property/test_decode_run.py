"""Test that runs of decode steps leave the same state as the same steps one by one, on random schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import JobKey, RequestId, SeqId
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.kv.block_pool import BlockPool
from tandem.sched.budget.step_time_model import features
from tandem.sched.phases.decode_run import DecodeRun
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult
from tests.effort import effort

BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """A job that is added before the step of this number, and cancelled so many steps later where that is not 0."""

    at: int
    num_prompt: int
    shared: int
    max_tokens: int
    may_stop: bool = False
    priority: int = 0
    cancel_after: int = 0
    num_choices: int = 1
    lane: Lane = Lane.INTERACTIVE


@dataclass
class Worker:
    """Drive one scheduler; `reports` has its steps, tokens and ends with the number of the plan."""

    scheduler: Scheduler
    jobs: dict[SeqId, JobKey] = field(default_factory=dict)
    reports: list[tuple[object, ...]] = field(default_factory=list)
    run_lengths: list[int] = field(default_factory=list)

    def step(self) -> bool:
        plan = self.scheduler.plan(float(self.scheduler.state.num_plans)).step
        if plan is None:
            return False
        self.reports.append(("step", plan.number, features(plan.slices)))
        for progress in (part for whole in self.scheduler.commit(result_of(plan)) for part in whole.parts):
            for i, token in enumerate(progress.tokens):
                self.reports.append((plan.number, progress.key, progress.first_index + i, token.id))
            if progress.finish is not None:
                self.reports.append((plan.number, progress.key, progress.finish))
        return True

    def take(self, run: DecodeRun, num_steps: int) -> None:
        sampled = [[token(seq, sampling.index + i) for i in range(num_steps)]
                 for seq, sampling in zip(run.seqs, run.samplings, strict=True)]  # fmt: skip
        tokens = self.scheduler.commit_run(run, sampled)
        for i in range(num_steps):
            self.reports.append(("step", run.number + i, run.features(i)))
            self.reports += [(run.number + i, one.key, one.first_index + i, one.ids[i]) for one in tokens]
        self.run_lengths.append(num_steps)

    def state(self) -> tuple[object, ...]:
        """All that later decisions follow from."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        seqs = [
            (seq.key, seq.status, seq.tokens, seq.num_computed, seq.num_in_flight, seq.num_pending, seq.table.ids(),
             seq.table.num_published, seq.hashes(seq.num_computed // BLOCK_SIZE, BLOCK_SIZE), seq.num_cached)
            for seq in scheduler.state.by_id.values()
        ]  # fmt: skip
        names = {name: pool._index.copies(name) for name in pool._index.all()}
        return seqs, tuple(pool._free), names, list(names), scheduler.load(), scheduler.state.num_plans


def token(seq: SeqId, index: int) -> int:
    """Few different ones, so that answers share blocks and stop."""
    return (seq * 7 + index // 3) % 4


def result_of(plan: StepPlan) -> StepResult:
    slices = []
    for piece in plan.slices:
        samplings = () if piece.sampling is None else piece.sampling.per_choice()
        sampled = [SampledToken(token(SeqId(piece.seq + i), sampling.index)) for i, sampling in enumerate(samplings)]
        slices.append(SliceResult(piece.seq, tuple(sampled)))
    return StepResult(plan.number, tuple(slices))


def job_of(number: int, wish: Wish) -> GenerateJob:
    prompt = (1,) * min(wish.shared, wish.num_prompt) + (2 + number,) * max(0, wish.num_prompt - wish.shared)
    stop = frozenset({3} if wish.may_stop else ())
    looks_back = float(number % 2)
    sampling = SamplingParams(max_tokens=wish.max_tokens, stop_token_ids=stop, frequency_penalty=looks_back)
    request = Request(id=RequestId(f"r{number}"), model="m", prompt_tokens=prompt, sampling=sampling,
                      priority=wish.priority, lane=wish.lane)  # fmt: skip
    return GenerateJob(request=request, attempt=1, num_choices=wish.num_choices)


def wishes() -> st.SearchStrategy[list[Wish]]:
    one = st.builds(
        Wish,
        at=st.integers(0, 40),
        num_prompt=st.integers(1, 14),
        shared=st.integers(0, 14),
        max_tokens=st.integers(0, 30),
        may_stop=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([0, 0, 1]),
        cancel_after=st.sampled_from([0, 0, 3, 11]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        lane=st.sampled_from([Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BATCH]),
    )
    return st.lists(one, min_size=1, max_size=6)


def worked(
    submitted: Sequence[Wish], limits: SchedulerLimits, num_blocks: int, caching: bool, longest: int
) -> tuple[Worker, list[object]]:
    """Runs of at most `longest` steps, cut where a job comes or goes; the state at each cut."""
    pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching, records_facts=True)
    worker = Worker(Scheduler(pool, limits, "model"))
    acts = [(wish.at, 0, i) for i, wish in enumerate(submitted)]
    acts += [(wish.at + wish.cancel_after, 1, i) for i, wish in enumerate(submitted) if wish.cancel_after]
    states: list[object] = []
    now, has_work = 0, True
    acts.sort()
    while acts or has_work:
        while acts and (acts[0][0] <= now or not has_work):
            _, is_cancel, number = acts.pop(0)
            job = job_of(number, submitted[number])
            if is_cancel:
                worker.scheduler.cancel(job.key)
            else:
                try:
                    worker.scheduler.add(job)
                except TandemError:
                    continue
            has_work = True
            states.append((now, worker.state(), pool.take_events()))
        room = min([longest, *[at - now for at, _, _ in acts[:1]]])
        run = worker.scheduler.run(room) if longest > 1 and room > 0 else None
        if run is not None:
            worker.take(run, run.num_steps)
            now += run.num_steps
        else:
            has_work = worker.step()
            now += has_work
        worker.scheduler.check()
        pool.check(worker.scheduler.tables(), (), (), worker.scheduler.copied_blocks())
    states.append((now, worker.state(), pool.take_events()))
    return worker, states


@effort(150)
@given(
    submitted=wishes(),
    num_blocks=st.sampled_from([8, 12, 20, 60]),
    caching=st.sampled_from([True, True, False]),
    longest=st.sampled_from([2, 5, 64]),
    limits=st.builds(
        SchedulerLimits,
        max_num_batched_tokens=st.sampled_from([8, 32]),
        max_num_seqs=st.sampled_from([2, 8]),
        max_model_len=st.just(64),
        enable_chunked_prefill=st.booleans(),
        max_lane_preemptions=st.sampled_from([0, 1, 2]),
        max_lane_pause_s=st.sampled_from([0.0, 5.0, 30.0]),
        batch_max_share=st.sampled_from([1.0, 1.0, 0.5]),
    ),
)
def test_a_run_leaves_what_its_steps_leave(
    submitted: list[Wish], num_blocks: int, caching: bool, longest: int, limits: SchedulerLimits
) -> None:
    single, states = worked(submitted, limits, num_blocks, caching, longest=1)
    many, same = worked(submitted, limits, num_blocks, caching, longest)
    assert same == states
    assert many.reports == single.reports


WIDE = SchedulerLimits(max_num_batched_tokens=32, max_num_seqs=8, max_model_len=64)


def test_runs_are_taken_and_end_before_a_sequence_does() -> None:
    submitted = [Wish(0, 6, 0, 20), Wish(0, 6, 0, 9)]
    worker, _ = worked(submitted, WIDE, 60, caching=True, longest=64)
    assert worker.run_lengths == [7, 10], "8 decodes of the shorter one and then 11 of the other, but each one's last"


def test_a_run_ends_where_blocks_do() -> None:
    worker = Worker(Scheduler(BlockPool(5, BLOCK_SIZE), WIDE, "model"))
    for number in range(2):
        worker.scheduler.add(job_of(number, Wish(0, 4, 0, 12)))
    assert worker.step()
    run = worker.scheduler.run(64)
    assert run is not None and run.num_steps == 4, "each has taken its second block, and one is left for two"
    with pytest.raises(ValueError, match="tokens were sampled"):
        worker.take(run, 5)


def test_a_forecast_is_void_once_something_was_done() -> None:
    worker = Worker(Scheduler(BlockPool(20, BLOCK_SIZE), WIDE, "model"))
    worker.scheduler.add(job_of(0, Wish(0, 4, 0, 12)))
    assert worker.scheduler.run(64) is None, "a prompt is no decode"
    assert worker.step()
    run = worker.scheduler.run(64)
    assert run is not None and worker.step()
    with pytest.raises(ValueError, match="the next is 2"):
        worker.take(run, 1)
