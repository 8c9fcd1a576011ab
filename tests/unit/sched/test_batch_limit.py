"""Test the limit on what batch sequences take of a worker, and the use of each lane in load reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.request import SamplingParams
from tandem.sched.scheduler import Scheduler
from tests.unit.sched.lane_jobs import batch, in_lane, urgent, with_choices
from tests.unit.sched.test_scheduler import add, generate, names, prefill, resume, scheduler, step


def _scheduler(share: float = 0.5, num_blocks: int = 60, budget: int = 64) -> Scheduler:
    return scheduler(num_blocks, budget=budget, max_lane_preemptions=1, max_lane_pause_s=30.0, batch_max_share=share)


def test_batch_prompts_wait_at_the_limit_and_hold_back_no_other_lane() -> None:
    s = _scheduler()
    add(s, *(batch(name, number) for number, name in enumerate("abc", 3)))
    assert step(s)[0] == ["a", "b"], "half of four seats"
    add(s, urgent("mine"), in_lane(Lane.STANDARD, generate("standard", 4, 9)))
    assert step(s)[0] == ["a", "b", "mine", "standard"]
    step(s)
    assert "c" in step(s)[0], "a has ended"


def test_without_a_limit_batch_takes_all() -> None:
    s = _scheduler(1.0)
    add(s, *(batch(name) for name in "abcd"))
    assert len(step(s)[0]) == 4


def test_one_batch_request_may_always_run() -> None:
    s = _scheduler(0.1)
    add(s, batch("large", 2, num_prompt=40), batch("b"))
    assert step(s)[0] == ["large"]
    assert step(s)[0] == ["large"], "its decode"
    assert step(s)[0] == ["b"]


def test_a_prompt_that_waits_for_the_limit_is_not_overtaken_by_smaller_ones() -> None:
    s = _scheduler(num_blocks=60)
    add(s, batch("first", 4, num_prompt=10))
    step(s)
    add(s, batch("large", 2, num_prompt=52), batch("small", 2, num_prompt=4))
    assert step(s)[0] == ["first"], "26 blocks and those of the first are more than 30"
    step(s)
    while "large" not in (who := step(s)[0]):
        assert "small" not in who
    assert who == ["large", "small"], "once the first has ended both fit"


def test_prefills_count_while_they_are_computed() -> None:
    s = _scheduler(0.25, budget=60)
    add(s, *(in_lane(Lane.BATCH, prefill(name, 16)) for name in "pqr"))
    assert [step(s)[0] for _ in range(3)] == [["p"], ["q"], ["r"]], "a quarter of four seats"
    add(s, with_choices(in_lane(Lane.BATCH, prefill("several", 55)), 2))
    s.plan()
    assert s.load().lane_seqs == (0, 0, 1), "its choices go on elsewhere"


def test_a_hand_off_above_the_limit_is_refused_and_keeps_its_turn() -> None:
    s = _scheduler()
    add(s, batch("a"))
    step(s)
    with pytest.raises(TandemError, match="batch_max_share") as refused:
        add(s, with_choices(in_lane(Lane.BATCH, resume("x", 4)), 2))
    assert refused.value.kind is ErrorKind.OVERLOADED
    with pytest.raises(TandemError, match="batch_max_share"):
        add(s, in_lane(Lane.BATCH, resume("y", 4)))
    add(s, in_lane(Lane.INTERACTIVE, resume("z", 4)))
    s.cancel(batch("a").key)
    add(s, with_choices(in_lane(Lane.BATCH, resume("x", 4)), 2))
    with pytest.raises(TandemError, match="batch_max_share"):
        add(s, in_lane(Lane.BATCH, resume("y", 4)))


def test_all_choices_of_a_sequence_count() -> None:
    s = _scheduler(budget=8)
    add(s, with_choices(batch("a", num_prompt=16), 2), batch("b"))
    assert step(s)[0] == ["a"], "it will be two sequences, which is half of the seats"
    assert s.load().lane_seqs == (0, 0, 2)
    assert step(s)[0] == ["a"]


def test_a_promoted_sequence_starts_whatever_the_limit() -> None:
    s = _scheduler(0.25)
    add(s, batch("a"))
    step(s)
    s.state.preempt(next(iter(s.state.running)))
    add(s, replace(late := batch("late"), request=replace(late.request, priority=-5)))
    assert step(s)[0] == ["late"] and step(s)[0] == ["late"], "it goes before the older one, and is the limit"
    planned = s.plan(31.0)
    assert names(s, planned.step) == ["late", "a"]


def test_runs_of_decodes_go_on_while_a_prompt_waits_for_the_limit() -> None:
    s = _scheduler()
    sampling = SamplingParams(max_tokens=20)
    for job in map(batch, "abc"):
        add(s, replace(job, request=replace(job.request, sampling=sampling)))
    step(s)
    assert s.run(8) is not None
    add(s, urgent("mine"))
    assert s.run(8) is None


def test_no_run_of_decodes_passes_the_promotion_of_a_paused_sequence() -> None:
    s = scheduler(60, budget=64, batch_max_share=0.25)
    late, paused = (
        replace(job, request=replace(job.request, sampling=SamplingParams(max_tokens=40), priority=priority))
        for job, priority in ((batch("late"), 0), (batch("paused"), 1))
    )
    add(s, paused)
    step(s)
    s.state.preempt(next(iter(s.state.running)))
    add(s, late)
    step(s)
    assert [str(seq.key.request) for seq in s.state.running] == ["late"] and s.state.num_free_seats
    assert s.run(8) is None, "the other will be promoted, and then exceed the limit"


def test_a_share_that_is_no_binary_fraction_is_not_rounded_down() -> None:
    s = scheduler(2000, budget=400, seqs=100, batch_max_share=0.57)
    add(s, *(batch(f"b{number}") for number in range(80)))
    assert len(step(s)[0]) == 57


def test_a_load_report_has_the_use_of_each_lane() -> None:
    s = _scheduler(1.0)
    add(s, batch("a"), urgent("u"), pull := in_lane(Lane.STANDARD, resume("x", 8)), batch("b"))
    step(s)
    assert (s.load().lane_seqs, s.load().lane_blocks) == ((1, 1, 2), (2, 5, 4)), "with the reservation"
    s.on_producer_ready(pull.key)
    step(s)
    assert (s.load().lane_seqs, s.load().lane_blocks) == ((1, 1, 2), (3, 5, 6)), "with the pull"
