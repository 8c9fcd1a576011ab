"""Test the times that an engine reports for its jobs, on schedules that are written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken, Token
from tandem.core.ids import HandoffId, JobKey, RequestId
from tandem.core.request import GenerateJob, Job, RemotePrefix
from tandem.core.request_stages import JobStages, Stage, Wait, WaitCause
from tandem.engine.effects import Effect, JobEnded, StartRead
from tandem.engine.engine import Engine
from tandem.engine.job_timeline import MAX_CHUNKS, JobTimes, PrefillChunk, PullTimes
from tandem.kv.block_pool import BlockPool
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult
from tests.unit.engine.test_engine import KEY, OTHER, offer, prefill, request, resume

BLOCK_BYTES = 100


class Line:
    """An engine with blocks of two tokens and steps of four, and all times that it has reported."""

    def __init__(self, plan_depth: int = 1, num_blocks: int = 40, max_num_seqs: int = 4, budget: int = 4) -> None:
        limits = SchedulerLimits(
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=2000, digest_handoffs=False
        )
        self.engine = Engine(
            BlockPool(num_blocks, 2), limits, HandoffConfig(), "model", block_bytes=BLOCK_BYTES, plan_depth=plan_depth
        )
        self.plans: list[StepPlan] = []
        self.ended: list[JobTimes] = []
        self.firsts: list[Token] = []

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.engine.check()
        self.ended += [x.times for x in effects if isinstance(x, JobEnded)]
        tokens = [x for x in effects if isinstance(x, Token)]
        self.firsts += [token for token in tokens if token.stages is not None]
        return effects

    def submit(self, job: Job, now: float) -> list[Effect]:
        return self.take(self.engine.submit(job, now))

    def begin(self, now: float) -> list[Effect]:
        plan, effects = self.engine.begin(now)
        self.plans += [] if plan is None else [plan]
        return self.take(effects)

    def finish(self, now: float, error: str | None = None) -> list[Effect]:
        plan = self.plans.pop(0)
        sampled = (SampledToken(50),)
        results = tuple(
            SliceResult(p.seq, sampled * p.sampling.num_choices if p.sampling and not error else (), error=error)
            for p in plan.slices
        )
        return self.take(self.engine.finish(StepResult(plan.number, results), now))

    def step(self, began: float, ended: float, error: str | None = None) -> list[Effect]:
        return [*self.begin(began), *self.finish(ended, error=error)]

    def compute_prompt(self, job: Job) -> None:
        """Submit a job at 0.0, and compute its seven tokens in steps from 1.0 to 3.0."""
        self.submit(job, 0.0)
        self.step(1.0, 2.0)
        self.step(2.0, 3.0)

    @property
    def last(self) -> JobTimes:
        return self.ended[-1]

    @property
    def num_kept(self) -> int:
        """Count the records that are kept; ended jobs must not leave any."""
        times = self.engine._times
        return len(times._timers) + len(times.awaiting_first_token)


def generate(name: str = "r", num_prompt: int = 7, max_tokens: int = 3, **facts: object) -> GenerateJob:
    made = request(name, range(num_prompt), max_tokens)
    return GenerateJob(request=made, attempt=1, **facts)  # type: ignore[arg-type]


def test_a_job_that_waits_computes_in_chunks_and_decodes() -> None:
    line = Line()
    line.submit(generate(), 1.0)
    line.step(3.0, 5.0)
    line.step(5.5, 7.0)
    assert [(token.index, token.stages) for token in line.firsts] == [
        (0, JobStages(prefill_queue_s=2.0, prefill_s=4.0))
    ]
    line.step(7.0, 8.0)
    assert line.ended == [] and line.num_kept
    line.step(8.0, 9.0)
    assert line.ended == [
        JobTimes(
            job=generate(),
            outcome="finished",
            accepted_at=1.0,
            started_at=3.0,
            first_token_at=7.0,
            ended_at=9.0,
            num_output=3,
            chunks=[PrefillChunk(3.0, 5.0, 4), PrefillChunk(5.5, 7.0, 3)],
        )
    ]
    assert line.last.stages == line.firsts[0].stages and line.num_kept == 0 and line.engine.num_generated == 3


def test_a_step_that_ends_after_its_job_does_not_change_the_record() -> None:
    line = Line()
    line.submit(generate(), 0.0)
    line.step(1.0, 2.0)
    line.begin(2.0)
    line.take(line.engine.cancel(generate().key, 2.5))
    chunks = [PrefillChunk(1.0, 2.0, 4)]
    assert line.last.chunks == chunks
    line.finish(3.0)
    assert line.last.chunks == chunks


@pytest.mark.parametrize("num_prompt", [1, 5])
def test_a_chunk_of_one_token_is_one(num_prompt: int) -> None:
    """A chunk of one token is planned like a decode."""
    line = Line()
    line.submit(generate(num_prompt=num_prompt, max_tokens=2), 0.0)
    for now in range(num_prompt // 4 + 2):
        line.step(now, now + 0.5)
    sizes = [4, 1] if num_prompt == 5 else [1]
    assert [chunk.num_tokens for chunk in line.last.chunks] == sizes
    assert line.last.chunks[-1].ended_at == line.last.first_token_at


def test_steps_that_have_room_for_one_token_compute_chunks_of_one() -> None:
    line = Line(max_num_seqs=1, budget=1)
    line.submit(generate(num_prompt=3, max_tokens=1), 0.0)
    for now in range(3):
        line.step(now, now + 0.5)
    assert line.last.chunks == [PrefillChunk(0, 0.5, 1), PrefillChunk(1, 1.5, 1), PrefillChunk(2, 2.5, 1)]


def test_cached_tokens_are_reported_and_not_computed() -> None:
    line = Line()
    for name in ("a", "b"):
        line.submit(generate(name, 7, 1), 0.0)
        while line.engine.num_live:
            line.step(1.0, 2.0)
    assert [times.num_cached for times in line.ended] == [0, 6]
    assert sum(chunk.num_tokens for chunk in line.last.chunks) == 1


def test_with_two_plans_open_a_chunk_is_planned_while_the_one_before_runs() -> None:
    line = Line(plan_depth=2)
    line.submit(generate(max_tokens=2), 0.0)
    line.begin(1.0)
    line.begin(2.0)
    line.finish(3.0)
    line.begin(3.0)
    line.finish(4.0)
    line.finish(5.0)
    assert line.last.chunks == [PrefillChunk(1.0, 3.0, 4), PrefillChunk(2.0, 4.0, 3)]
    assert line.last.stages == JobStages(prefill_queue_s=1.0, prefill_s=3.0) and line.last.ended_at == 5.0


def test_a_prefill_hands_over() -> None:
    line = Line()
    line.compute_prompt(prefill())
    assert (line.last.outcome, line.last.num_output, line.last.kind) == ("handed_over", 1, "prefill")
    assert line.last.stages == line.firsts[0].stages == JobStages(prefill_queue_s=1.0, prefill_s=2.0)
    line.take(line.engine.release(KEY, 4.0))
    assert len(line.ended) == 1


def taken(line: Line) -> None:
    """Read what OTHER offers: the first blocks while it computes the rest, the last one a second after its last
    announcement."""
    line.submit(resume(), 0.0)
    line.take(line.engine.announced(offer(0, 2), 1.0))
    line.engine.renewed((KEY,), 0.0, 10.0)
    (first,) = line.begin(1.0)
    second = line.take(line.engine.announced(offer(2, 4, 50), 2.0))[-1]
    for read in (first, second):
        assert isinstance(read, StartRead)
        line.take(line.engine.read_done(read.read, 3.0))


def test_a_resume_reports_exposed_transfer_and_waiting() -> None:
    line = Line()
    taken(line)
    assert line.firsts == [], "what its source drew is no token of its own"
    line.step(3.5, 4.0)
    stages = JobStages(transfer_s=1.0, decode_queue_s=0.5, decode_s=0.5)
    assert [(token.index, token.stages) for token in line.firsts] == [(1, stages)]
    line.step(4.0, 5.0)
    pull = PullTimes(
        kind="handoff",
        outcome="done",
        source=OTHER,
        num_blocks=4,
        num_bytes=4 * BLOCK_BYTES,
        num_exposed_bytes=4 * BLOCK_BYTES,
        first_announced_at=1.0,
        last_announced_at=2.0,
        ready_at=3.0,
        busy_s=2.0,
    )
    times = (line.last.accepted_at, line.last.started_at, line.last.first_token_at, line.last.ended_at)
    assert times == (0.0, 3.5, 4.0, 5.0) and line.last.pull == pull and line.last.stages == stages
    assert line.last.num_output == 2 == line.engine.num_generated, "without the one of its source"


def test_a_prompt_reports_what_it_waited_for() -> None:
    line = Line(max_num_seqs=1)
    line.submit(generate("a", 3, 3), 0.0)
    line.step(0.0, 1.0)
    line.submit(generate("b", 3, 1), 1.5)
    line.step(2.0, 3.0)
    line.step(3.0, 4.0)
    line.step(5.0, 6.0)
    waits = (Wait(Stage.PREFILL_QUEUE, WaitCause.SEAT, 3.0),)
    stages = JobStages(prefill_queue_s=3.5, prefill_s=1.0, waits=waits)
    assert line.firsts[-1].stages == line.last.stages == stages


@pytest.mark.parametrize(("announced_at", "waited_s"), [(0.5, 4.0), (3.0, 2.0), (5.0, 0.0)])
def test_a_resume_reports_how_long_it_waited_for_a_seat_after_its_source_was_done(
    announced_at: float, waited_s: float
) -> None:
    """Until its source has computed the last block, a seat would be of no use."""
    line = Line(max_num_seqs=2)
    for name in "ab":
        line.submit(generate(name, 1, 4), 0.0)
    line.engine._scheduler.state.limits = replace(line.engine._scheduler.state.limits, max_num_seqs=3)
    line.submit(resume(), 0.0)
    line.engine._scheduler.state.limits = replace(line.engine._scheduler.state.limits, max_num_seqs=2)
    line.engine.renewed((KEY,), 0.0, 10.0)
    line.take(line.engine.announced(offer(0, 2), 0.5))
    reads: list[StartRead] = []

    def taken(effects: list[Effect]) -> None:
        reads.extend(x for x in effects if isinstance(x, StartRead))

    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        if announced_at <= now < announced_at + 1:
            taken(line.take(line.engine.announced(offer(2, 4, 50), announced_at)))
        taken(line.begin(now))
        if line.plans:
            taken(line.finish(now + 0.5))
    for read in reads:
        line.take(line.engine.read_done(read.read, 6.0))
    line.step(6.0, 7.0)
    (token,) = [token for token in line.firsts if token.key == resume().key]
    assert token.stages is not None and token.stages.transfer_s == 6.0 - announced_at
    waits = (Wait(Stage.TRANSFER, WaitCause.SEAT, waited_s),) if waited_s else ()
    assert token.stages.waits == waits


def test_a_resume_that_reads_nothing_has_no_transfer() -> None:
    """The last announcement may be late, although no block is waited for."""
    line = Line()
    line.submit(generate("warm", 7, 4), 0.0)
    while line.engine.num_live:
        line.step(0.0, 0.0)
    line.submit(resume(), 1.0)
    line.engine.renewed((KEY,), 1.0, 10.0)
    line.take(line.engine.announced(offer(0, 3), 1.0))
    line.begin(1.0)
    # Six of its seven tokens are here; the last block comes with the source's word, and is to be read.
    effects = line.take(line.engine.announced(offer(3, 4, 50), 2.0))
    (read,) = [x for x in effects if isinstance(x, StartRead)]
    line.take(line.engine.read_done(read.read, 6.0))
    line.step(6.0, 7.0)
    (token,) = [token for token in line.firsts if token.key == resume().key]
    assert token.stages is not None and token.stages.transfer_s == 4.0
    line.step(7.0, 8.0)
    assert line.last.num_cached == 6 and line.last.pull is not None and line.last.pull.num_blocks == 1


def test_each_choice_reports_its_first_token_and_all_are_one_job() -> None:
    line = Line()
    line.compute_prompt(generate(max_tokens=2, num_choices=3))
    stages = JobStages(prefill_queue_s=1.0, prefill_s=2.0)
    assert [(token.key.choice, token.stages) for token in line.firsts] == [(i, stages) for i in range(3)]
    line.take(line.engine.cancel(JobKey(RequestId("r"), 1, 1), 3.5))
    assert line.ended == []
    line.step(4.0, 5.0)
    assert (line.last.outcome, line.last.num_output, line.last.ended_at) == ("finished", 5, 5.0)
    assert len(line.ended) == 1 and line.num_kept == 0


def test_a_job_has_failed_if_one_of_its_choices_has() -> None:
    line = Line()
    line.compute_prompt(generate(max_tokens=2, num_choices=2))
    line.begin(3.0)
    plan = line.plans.pop(0)
    broken, whole = (piece.seq for piece in plan.slices)
    results = (SliceResult(broken, error="gone"), SliceResult(whole, (SampledToken(50),)))
    line.take(line.engine.finish(StepResult(plan.number, results), 4.0))
    assert (line.last.outcome, line.last.error, line.last.num_output) == ("failed", "gone", 3)


def test_a_choice_that_ended_before_its_first_token_samples_none() -> None:
    line = Line()
    line.submit(generate(max_tokens=1, num_choices=2), 0.0)
    line.take(line.engine.cancel(JobKey(RequestId("r"), 1, 0), 0.5))
    line.step(1.0, 2.0)
    line.step(2.0, 3.0)
    assert [token.key.choice for token in line.firsts] == [1]
    assert line.last.num_output == 1 and line.last.outcome == "finished" and line.num_kept == 0


def test_one_that_was_preempted_goes_on_with_the_times_that_it_had() -> None:
    line = Line(num_blocks=8)
    line.submit(generate("old", 7, 6), 0.0)
    young_request = replace(request("young", range(5), 6), cache_salt="own")
    line.submit(GenerateJob(request=young_request, attempt=1), 0.0)
    for now in range(1, 40):
        if line.engine.num_live:
            line.step(float(now), now + 0.5)
    assert line.engine.num_preempted > 0
    young = next(times for times in line.ended if times.job.request.id == "young")
    assert young.outcome == "finished" and young.num_output == 6
    assert len([token for token in line.firsts if token.key.request == "young"]) == 1
    # What it gave up is computed again, after its first token.
    assert sum(chunk.num_tokens for chunk in young.chunks) > 5
    assert young.chunks[-1].planned_at > (young.first_token_at or 0.0)


Cancel = Callable[[Line], None]


def while_waiting(line: Line) -> None:
    line.submit(generate(), 0.0)


def while_its_first_chunk_runs(line: Line) -> None:
    line.submit(generate(), 0.0)
    line.begin(1.0)


def between_chunks(line: Line) -> None:
    line.submit(generate(), 0.0)
    line.step(1.0, 2.0)


def while_decoding(line: Line) -> None:
    line.compute_prompt(generate())


def while_its_source_computes(line: Line) -> None:
    line.submit(resume(), 0.0)


def while_reading(line: Line) -> None:
    line.submit(resume(), 0.0)
    line.take(line.engine.announced(offer(0, 2), 1.0))
    line.begin(1.0)


def once_its_kv_is_here(line: Line) -> None:
    taken(line)


def while_fetching_a_prefix(line: Line) -> None:
    prefix = RemotePrefix(handoff=HandoffId("fetch"), source=OTHER, num_blocks=3)
    line.submit(generate(prefix=prefix), 0.0)


@pytest.mark.parametrize(
    ("state", "started", "num_sampled", "pull"),
    [
        (while_waiting, False, 0, None),
        (while_its_first_chunk_runs, True, 0, None),
        (between_chunks, True, 0, None),
        (while_decoding, True, 1, None),
        (while_its_source_computes, False, 0, "cancelled"),
        (while_reading, False, 0, "cancelled"),
        (once_its_kv_is_here, False, 0, "done"),
        (while_fetching_a_prefix, False, 0, "cancelled"),
    ],
)
def test_a_cancelled_job_reports_its_progress(state: Cancel, started: bool, num_sampled: int, pull: str) -> None:
    line = Line()
    state(line)
    line.take(line.engine.cancel(generate().key, 5.0))
    assert len(line.ended) == 1 and line.num_kept == 0
    times = line.last
    assert (times.outcome, times.ended_at, times.error_kind, times.error) == ("cancelled", 5.0, None, "")
    assert (times.started_at is not None, times.num_output) == (started, num_sampled)
    assert (None if times.pull is None else times.pull.outcome) == pull
    while line.plans:
        line.finish(6.0)
    assert line.take(line.engine.cancel(generate().key, 7.0)) == [] and len(line.ended) == 1


def test_a_failed_job_reports_its_error() -> None:
    line = Line()
    line.submit(generate(), 0.0)
    line.step(1.0, 2.0, error="the KV is gone")
    assert (line.last.outcome, line.last.error_kind, line.last.error) == (
        "failed",
        ErrorKind.INTERNAL,
        "the KV is gone",
    )


def test_a_resume_whose_kv_is_lost_reports_it() -> None:
    line = Line()
    while_reading(line)
    line.take(line.engine.handoff_ended(KEY, ErrorKind.KV_LOST, "gone", 4.0))
    assert line.last.outcome == "failed" and line.last.error_kind is ErrorKind.KV_LOST
    assert line.last.pull is not None and line.last.pull.outcome == "failed" and line.last.stages is None


def test_a_resume_whose_source_drew_all_has_done_its_part() -> None:
    line = Line()
    while_its_source_computes(line)
    line.take(line.engine.handoff_ended(KEY, ErrorKind.CANCELLED, "nothing is left", 4.0))
    assert line.last.outcome == "finished" and line.last.pull is not None and line.last.pull.outcome == "cancelled"


def test_a_worker_that_drains_gives_back_what_waits() -> None:
    line = Line()
    line.submit(generate(), 0.0)
    line.take(line.engine.start_drain(1.0))
    assert (line.last.outcome, line.last.error_kind) == ("given_back", None)


def test_a_newer_attempt_ends_the_older_one_before_its_own_begins() -> None:
    line = Line()
    line.submit(generate(), 0.0)
    line.submit(replace(generate(), attempt=2), 3.0)
    assert [(times.job.attempt, times.outcome, times.ended_at) for times in line.ended] == [(1, "cancelled", 3.0)]


def test_a_job_that_is_refused_or_known_leaves_no_times() -> None:
    line = Line()
    line.submit(generate(), 0.0)
    line.submit(generate(), 1.0)
    line.take(line.engine.cancel(generate().key, 2.0))
    line.submit(generate(), 3.0)
    assert len(line.ended) == 1 and line.num_kept == 0


def test_an_abandoned_engine_fails_live_jobs_and_reports_sampled_tokens() -> None:
    line = Line()
    while_decoding(line)
    line.submit(generate("two"), 4.0)
    effects = line.engine.abandon(ErrorKind.WORKER_LOST, "the worker stopped", 5.0)
    ended = [x.times for x in effects if isinstance(x, JobEnded)]
    assert [(t.job.request.id, t.outcome, t.num_output, t.error_kind) for t in ended] == [
        ("r", "failed", 1, ErrorKind.WORKER_LOST),
        ("two", "failed", 0, ErrorKind.WORKER_LOST),
    ]


def test_chunks_without_end_are_bounded() -> None:
    line = Line(num_blocks=700)
    num_prompt = 4 * (MAX_CHUNKS + 10)
    line.submit(generate(num_prompt=num_prompt, max_tokens=1), 0.0)
    now = 0.0
    while line.engine.num_live:
        line.step(now, now + 1.0)
        now += 1.0
    chunks = line.last.chunks
    assert len(chunks) == MAX_CHUNKS and sum(chunk.num_tokens for chunk in chunks) == num_prompt
    assert chunks[-1] == PrefillChunk(MAX_CHUNKS - 1.0, now, 44)
