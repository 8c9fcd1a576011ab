"""Test what the scheduler reports of why sequences waited, and of what yielded to them."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.events import LaneYield, Preemption, SampledToken
from tandem.core.ids import HandoffId
from tandem.core.lane import Lane
from tandem.core.request import Job, RemotePrefix
from tandem.core.request_stages import WaitCause
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.schedule_result import WaitSpan
from tandem.sched.state.sequence import MAX_WAITS
from tests.unit.sched.lane_jobs import batch, in_lane, urgent, with_choices
from tests.unit.sched.test_scheduler import SOURCE, finish, generate, prefill, resume, scheduler

STEP, PREFIX, PROMPTS = WaitCause.STEP, WaitCause.REMOTE_PREFIX, WaitCause.PROMPTS_AHEAD
SEAT, BLOCKS, LEASES, SHARE = WaitCause.SEAT, WaitCause.BLOCKS, WaitCause.LEASES, WaitCause.BATCH_SHARE


def _scheduler(seats: int = 4, num_blocks: int = 60, *, budget: int = 32, most: int = 0, share: float = 1) -> Scheduler:
    return scheduler(num_blocks, budget=budget, seqs=seats, max_lane_preemptions=most, batch_max_share=share)


def _add(s: Scheduler, now: float, *jobs: Job) -> None:
    for job in jobs:
        s.add(job, now)


def _waits(s: Scheduler, *times: float) -> dict[str, Sequence[WaitSpan]]:
    """Make one step at each time, and return what each sequence that starts or gets blocks for its pull had waited
    for."""
    found: dict[str, Sequence[WaitSpan]] = {}
    for now in times:
        planned = s.plan(now)
        for each in (*planned.starts, *planned.pulls):
            found[str(each.key.request)] = each.waits
        if planned.step is not None:
            finish(s, planned.step)
        s.check()
    return found


def test_what_starts_at_the_next_step_waits_for_nothing_else() -> None:
    s = _scheduler()
    _add(s, 0.5, generate("a", 4, 9))
    _waits(s, 1.0)
    _add(s, 1.5, generate("b", 4, 9))
    assert _waits(s, 2.0) == {"b": ()}


def test_sequences_wait_for_a_seat_whatever_is_before_them() -> None:
    s = _scheduler(seats=1)
    _add(s, 0.0, generate("a", 4, 3))
    _waits(s, 0.0)
    _add(s, 0.5, generate("b", 4, 1), generate("c", 4, 1))
    found = _waits(s, 1.0, 2.0)
    _add(s, 2.5, generate("d", 4, 1))
    found |= _waits(s, 3.0, 4.0, 5.0)
    assert found["b"] == (WaitSpan(SEAT, 1.0, 3.0),), "until the first plan it waited for a step"
    assert found["c"] == (WaitSpan(PROMPTS, 0.5, 1.0, 4), WaitSpan(SEAT, 1.0, 4.0))
    assert found["d"] == (WaitSpan(SEAT, 2.5, 5.0),), "it arrived while others waited for a seat"


def test_a_prompt_waits_for_those_before_it_and_counts_their_tokens() -> None:
    s = _scheduler(budget=8)
    _add(s, 0.0, *(in_lane(Lane.STANDARD, generate(name, num, 1)) for name, num in (("a", 20), ("b", 12))))
    found = _waits(s, 1.0)
    _add(s, 1.5, urgent("u"), in_lane(Lane.BATCH, generate("c", 12, 1)))
    found |= _waits(s, *map(float, range(2, 9)))
    assert found["a"] == () == found["u"], "less urgent prompts are not ahead"
    assert found["b"] == (WaitSpan(PROMPTS, 0.0, 1.0, 20),), "it has its part of the first step"
    assert [(x.cause, x.since, x.num_tokens_ahead) for x in found["c"]] == [(PROMPTS, 1.5, 12 + 12 + 4)]


def test_a_prompt_waits_for_blocks() -> None:
    s = _scheduler(num_blocks=10)
    _add(s, 0.0, generate("a", 11, 3))
    _waits(s, 0.0)
    _add(s, 0.0, generate("large", 9, 1), generate("small", 2, 1))
    found = _waits(s, 1.0, 2.0, 3.0)
    assert found["large"] == (WaitSpan(BLOCKS, 1.0, 3.0),)
    assert found["small"] == (WaitSpan(PROMPTS, 0.0, 1.0, 9), WaitSpan(BLOCKS, 1.0, 3.0)), "held back"


def test_prompts_wait_for_leases() -> None:
    s = _scheduler(num_blocks=10)
    _add(s, 0.0, prefill("p", 12))
    _waits(s, 0.0)
    _add(s, 1.0, prefill("q", 12), generate("g", 13, 1))
    assert _waits(s, 1.0, 2.0) == {}
    assert [seq.take_waits(3.0) for seq in s.state.waiting] == [
        (WaitSpan(LEASES, 1.0, 3.0),),
        (WaitSpan(PROMPTS, 1.0, 1.0, 12), WaitSpan(LEASES, 1.0, 3.0)),
    ]


def test_batch_prompts_wait_for_the_limit_of_their_lane() -> None:
    s = _scheduler(share=0.25)
    _add(s, 0.0, batch("a", 3))
    _waits(s, 0.0)
    _add(s, 0.5, batch("b", 1), urgent("u", 9))
    found = _waits(s, 1.0, 2.0, 3.0)
    assert found["b"] == (WaitSpan(SHARE, 1.0, 3.0),) and found["u"] == ()


def test_a_job_waits_for_its_prefix_and_then_for_what_holds_others_back() -> None:
    s = _scheduler(seats=1)
    prefix = RemotePrefix(handoff=HandoffId("fetch"), source=SOURCE, num_blocks=2)
    jobs = [generate(name, 8, 1) for name in "fg"]
    _add(s, 1.0, *(type(job)(request=job.request, attempt=1, prefix=prefix) for job in jobs))
    _waits(s, 2.0)
    s.on_prefix_ready(jobs[0].key, 3.0)
    assert _waits(s, 4.0)["f"] == (WaitSpan(PREFIX, 1.0, 3.0), WaitSpan(STEP, 3.0, 4.0))
    _add(s, 4.0, generate("a", 4, 3), generate("b", 4, 1))
    _waits(s, 5.0, 6.0)
    s.on_prefix_ready(jobs[1].key, 6.5)
    assert _waits(s, 7.0, 8.0)["g"] == (WaitSpan(PREFIX, 1.0, 6.5), WaitSpan(SEAT, 6.5, 8.0))


def test_a_pull_waits_from_the_time_on_at_which_its_source_is_ready() -> None:
    s = _scheduler(seats=2)
    _add(s, 0.0, batch("a", 4), batch("b", 4))
    _waits(s, 0.0)
    jobs = [in_lane(Lane.INTERACTIVE, resume(name, 4)) for name in "xy"]
    s.state.limits = _scheduler(seats=2, most=1).state.limits
    _add(s, 0.5, *jobs)
    s.state.limits = _scheduler(seats=2).state.limits
    _waits(s, 1.0)
    s.on_producer_ready(jobs[0].key, 1.5)
    _waits(s, 2.0)
    s.on_producer_ready(jobs[1].key, 2.5)
    found = _waits(s, 3.0, 4.0)
    assert found == {"x": (WaitSpan(SEAT, 2.0, 4.0),), "y": (WaitSpan(SEAT, 2.5, 4.0),)}


def test_a_sequence_that_is_started_again_reports_no_wait() -> None:
    s = _scheduler(seats=1, most=1)
    _add(s, 0.0, batch("b"))
    _waits(s, 0.0)
    _add(s, 0.5, urgent("mine", 2))
    found = _waits(s, 1.0, 2.0, 3.0)
    assert found == {"mine": (), "b": ()}


def test_a_sequence_whose_cause_changes_for_ever_records_a_bounded_number() -> None:
    s = _scheduler(seats=1)
    _add(s, 0.0, generate("a", 4, 9))
    _waits(s, 0.0)
    _add(s, 0.0, generate("b", 4, 1))
    (seq,) = s.state.waiting
    for number in range(100):
        seq.wait_for((SEAT, BLOCKS)[number % 2], float(number))
    waits = seq.take_waits(100.0)
    assert len(waits) == MAX_WAITS and waits[-1] == WaitSpan(BLOCKS, MAX_WAITS - 1.0, 100.0)
    assert seq.take_waits(101.0) == ()


# ---- what yielded


def _reported(s: Scheduler, *times: float) -> dict[str, list[Preemption]]:
    """Make one step at each time, and return what each sequence reports of preemption."""
    found: dict[str, list[Preemption]] = {}
    for now in times:
        planned = s.plan(now)
        for update in finish(s, planned.step):
            for part in update.parts:
                if part.preemption is not None:
                    found.setdefault(str(part.key.request), []).append(part.preemption)
    return found


def test_a_prompt_reports_with_its_first_token_what_yielded_to_it() -> None:
    s = _scheduler(seats=9, num_blocks=16, most=1)
    _add(s, 0.0, *(batch(name, 20) for name in "ab"), in_lane(Lane.STANDARD, generate("c", 4, 20)))
    _reported(s, *map(float, range(5)))
    assert [(seq.num_computed, len(seq.table)) for seq in s.state.running] == [(8, 4)] * 3
    _add(s, 5.0, in_lane(Lane.INTERACTIVE, generate("mine", 24, 2)))
    planned = s.plan(5.0)
    assert planned.num_yielded == 3
    (update,) = finish(s, planned.step)
    assert update.preemption == Preemption(
        yields=(LaneYield(Lane.STANDARD, 1, 8, 4), LaneYield(Lane.BATCH, 2, 16, 8)),
    )
    assert "mine" not in _reported(s, 6.0), "it is reported once"


def test_a_pull_reports_what_yielded_to_it_with_the_first_token_of_this_worker() -> None:
    s = _scheduler(seats=1, most=1)
    _add(s, 0.0, batch("b"))
    _reported(s, 0.0)
    _add(s, 1.0, job := in_lane(Lane.INTERACTIVE, resume("x", 4, 3)))
    s.on_producer_ready(job.key, 1.0)
    assert [pull.key for pull in s.plan(1.0).pulls] == [job.key]
    update = s.kv_arrived(job.key, (SampledToken(50),), 0, 4)
    assert update.preemption is None and len(update.tokens) == 1, "its source has reported this token"
    assert _reported(s, 2.0) == {"x": [Preemption(yields=(LaneYield(Lane.BATCH, 1, 4, 2),))]}


def test_one_of_several_choices_reports_what_yielded_to_all() -> None:
    s = _scheduler(seats=2, most=1)
    _add(s, 0.0, batch("a"), batch("b"))
    _reported(s, 0.0)
    _add(s, 1.0, with_choices(in_lane(Lane.INTERACTIVE, generate("mine", 40, 3)), 2))
    planned = s.plan(1.0)
    assert planned.num_yielded == 1
    finish(s, planned.step, 50, 51)
    planned = s.plan(2.0)
    (progress,) = [update for update in finish(s, planned.step, 50, 51) if update.branches]
    assert [part.preemption for part in progress.parts] == [Preemption(yields=(LaneYield(Lane.BATCH, 1, 4, 2),)), None]
