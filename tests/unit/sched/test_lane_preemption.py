"""Test which running sequences yield seats and blocks to waiting ones of more urgent lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Pauses, SampledToken
from tandem.core.lane import Lane
from tandem.core.request import SamplingParams
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.sequence import MigrationState
from tandem.sched.state.step_plan import StepResult
from tests.unit.sched.lane_jobs import batch, in_lane, urgent, with_choices
from tests.unit.sched.test_scheduler import add, finish, generate, names, prefill, resume, scheduler, step

_MANY = 99


def _scheduler(seats: int, most: int = 1, num_blocks: int = 60) -> Scheduler:
    return scheduler(num_blocks, budget=32, seqs=seats, max_lane_preemptions=most)


def _run(s: Scheduler) -> list[list[str]]:
    """Step until nothing is left, and return the sequences of each step."""
    steps: list[list[str]] = []
    while s.num_sequences and len(steps) < _MANY:
        steps.append(step(s)[0])
    return steps


def test_the_youngest_of_the_least_urgent_lane_yields() -> None:
    s = _scheduler(3)
    add(s, batch("old"), in_lane(Lane.STANDARD, generate("standard", 4, 20)), batch("young"))
    step(s)
    add(s, urgent("mine"))
    who, planned = step(s)
    assert who == ["standard", "old", "mine"] and planned.num_yielded == 1
    assert [len(s.state.running), len(s.state.waiting)] == [3, 1]
    assert s.load().lane_paused == (0, 0, 1)
    assert _run(s)[-1] == ["young"], "it goes on when a seat is free"
    assert s.load().lane_paused == (0, 0, 0)


def test_choices_with_output_are_reported_and_prompts_are_not() -> None:
    s = _scheduler(2)
    add(s, batch("old"), batch("young"))
    for _ in range(3):
        step(s)
    add(s, batch("prompt", 2, num_prompt=60), urgent("mine"))
    planned = step(s)[1]
    (paused,) = planned.preempted
    assert (paused.key.request, paused.next_index) == ("young", 3)
    s = _scheduler(1)
    add(s, in_lane(Lane.BATCH, generate("prompt", 60, 2)))
    step(s)
    add(s, urgent("mine"))
    planned = step(s)[1]
    assert planned.num_yielded == 1 and planned.preempted == ()


def test_what_was_computed_is_found_in_the_prefix_cache() -> None:
    s = _scheduler(1)
    add(s, batch("b"))
    for _ in range(5):
        step(s)
    add(s, urgent("mine"))
    while "b" not in (who := step(s))[0]:
        pass
    (piece,) = (who[1].step or pytest.fail()).slices
    assert (piece.start, len(s.state.by_id[piece.seq].tokens)) == (8, 10), "four blocks of two tokens"


@pytest.mark.parametrize("lane", [Lane.BATCH, Lane.STANDARD])
def test_lanes_that_are_not_less_urgent_yield_nothing(lane: Lane) -> None:
    s = _scheduler(1)
    add(s, in_lane(Lane.STANDARD, generate("first", 4, 9)))
    step(s)
    add(s, in_lane(lane, generate("second", 4, 9)))
    assert step(s)[0] == ["first"]


def test_a_sequence_yields_so_often_and_no_more() -> None:
    s = _scheduler(1, most=2)
    add(s, batch("b"))
    step(s)
    for number in range(5):
        add(s, urgent(f"u{number}", 2))
    assert step(s)[1].num_yielded == 1
    # All urgent ones take the seat in a row: that is one time.
    assert _run(s)[-1] == ["b"]
    later = _scheduler(1, most=2)
    add(later, batch("b"))
    order: list[str] = []
    for number in range(4):
        order += [who for who, _ in (step(later) for _ in range(2)) for who in who]
        add(later, urgent(f"u{number}", 1))
    assert order.count("b") >= 3 and [name for name in order if name != "b"] == ["u0", "u1"]


def test_nothing_yields_where_seats_are_free_or_it_is_off() -> None:
    for s in (_scheduler(2), _scheduler(1, most=0)):
        add(s, batch("b"))
        step(s)
        add(s, urgent("mine"))
        who, planned = step(s)
        assert "b" in who and planned.num_yielded == 0


def test_a_sequence_in_an_open_plan_is_left_out_until_it_can_yield() -> None:
    """Steps that are planned ahead, as on a GPU."""
    s = _scheduler(2)
    add(s, batch("a"), batch("b"))
    first = s.plan().step
    add(s, urgent("mine"))
    second = s.plan()
    assert names(s, second.step) == ["a"] and second.num_yielded == 0
    finish(s, first)
    third = s.plan()
    assert names(s, third.step) == ["a", "mine"] and third.num_yielded == 1
    s.check()


def test_what_another_worker_may_read_keeps_its_seat() -> None:
    s = _scheduler(1)
    add(s, in_lane(Lane.BATCH, prefill("p", 50)))
    step(s)
    add(s, urgent("mine"))
    assert step(s)[0] == ["p"], "the second half of the prompt"
    moving = _scheduler(1)
    add(moving, batch("b"))
    step(moving)
    next(iter(moving.state.running)).migration_state = MigrationState.STREAMING
    add(moving, urgent("mine"))
    assert step(moving)[1].num_yielded == 0


def test_a_hand_off_is_accepted_to_a_seat_that_will_be_yielded() -> None:
    s = _scheduler(2)
    add(s, batch("a"), batch("b"))
    step(s)
    for name in ("x", "y"):
        add(s, in_lane(Lane.INTERACTIVE, resume(name, 4)))
    with pytest.raises(TandemError, match="2 sequences run or have a seat reserved, max_num_seqs is 2") as refused:
        add(s, in_lane(Lane.INTERACTIVE, resume("z", 4)))
    assert refused.value.kind is ErrorKind.OVERLOADED
    with pytest.raises(TandemError, match="4 sequences run or have a seat reserved, max_num_seqs is 2"):
        add(s, in_lane(Lane.BATCH, resume("late", 4)))
    assert step(s)[0] == ["a", "b"], "the source of neither is ready"
    s.on_producer_ready(in_lane(Lane.INTERACTIVE, resume("x", 4)).key)
    who, planned = step(s)
    assert who == ["a"] and [str(pull.key.request) for pull in planned.pulls] == ["x"]


def test_a_rejected_hand_off_keeps_no_seat_from_a_more_urgent_one() -> None:
    s = _scheduler(4)
    add(s, *(batch(name) for name in "abcd"))
    step(s)
    large = with_choices(in_lane(Lane.BATCH, resume("large", 4)), 2)
    with pytest.raises(TandemError, match="no room to reserve"):
        add(s, large)
    for name in "wxyz":
        add(s, in_lane(Lane.INTERACTIVE, resume(name, 4)))


def test_several_short_prompts_leave_room_once_for_those_that_run() -> None:
    s = _scheduler(24, num_blocks=44)
    add(s, *(batch(f"b{number}", 4) for number in range(8)))
    step(s)
    add(s, *(urgent(f"u{number}") for number in range(4)))
    planned = step(s)[1]
    assert (planned.num_yielded, len(planned.starts)) == (0, 4)


def test_runs_of_decodes_end_where_a_seat_is_due() -> None:
    s, job = _scheduler(1), batch("b")
    add(s, replace(job, request=replace(job.request, sampling=SamplingParams(max_tokens=20))))
    step(s)
    assert s.run(8) is not None
    add(s, urgent("mine"))
    assert s.run(8) is None


def test_as_many_yield_as_a_prompt_needs_blocks() -> None:
    s = _scheduler(9, num_blocks=16)
    add(s, *(batch(name, 20) for name in "abc"))
    for _ in range(5):
        step(s)
    assert [len(seq.table) for seq in s.state.running] == [4, 4, 4]
    add(s, in_lane(Lane.INTERACTIVE, generate("mine", 14, 2)))
    who, planned = step(s)
    assert who == ["a", "mine"] and planned.num_yielded == 2, "4 free blocks and 4 of each, for 7 and room to grow"
    assert _run(s)[-1] == ["c"]
    s.check()


def test_nothing_yields_in_vain() -> None:
    """A prompt for which all less urgent sequences together have too few blocks waits, and they run on."""
    s = _scheduler(9, num_blocks=16)
    add(s, in_lane(Lane.INTERACTIVE, generate("older", 16, 4)), batch("b", 20))
    step(s)
    add(s, in_lane(Lane.INTERACTIVE, generate("mine", 22, 2)))
    who, planned = step(s)
    assert who == ["older", "b"] and planned.num_yielded == 0


@pytest.mark.parametrize(("num_older", "num_yielded"), [(0, 1), (4, 0)])
def test_blocks_that_both_share_are_not_counted_as_freed(num_older: int, num_yielded: int) -> None:
    """The two blocks that the batch request shares with the urgent one make room for nothing."""
    s = _scheduler(9, num_blocks=10 if num_older else 8)
    add(s, batch("b", 12))
    if num_older:
        add(s, in_lane(Lane.INTERACTIVE, generate("older", num_older, 9)))
    for _ in range(3):
        step(s)
    prompt = s.state.by_key[batch("b").key].tokens[:4]
    mine, text = urgent("mine"), (*prompt, *range(100, 112 if num_older else 109))
    add(s, replace(mine, request=replace(mine.request, prompt_tokens=text)))
    who, planned = step(s)
    assert ("mine" in who, planned.num_yielded) == (num_yielded == 1, num_yielded)
    s.check()


def test_a_pull_gets_the_blocks_of_less_urgent_sequences() -> None:
    s = _scheduler(9, num_blocks=12)
    add(s, batch("a", 20), batch("b", 20))
    for _ in range(5):
        step(s)
    add(s, job := in_lane(Lane.INTERACTIVE, resume("x", 8)))
    s.on_producer_ready(job.key)
    who, planned = step(s)
    assert (who, planned.num_yielded) == (["a"], 1)
    assert [str(pull.key.request) for pull in planned.pulls] == ["x"]


def test_each_plan_makes_room_for_one_prompt_and_for_all_pulls() -> None:
    s = _scheduler(4)
    add(s, *(batch(name) for name in "abcd"))
    step(s)
    pulls = [in_lane(Lane.INTERACTIVE, resume(name, 4)) for name in "xy"]
    add(s, urgent("u0"), urgent("u1"), *pulls)
    for job in pulls:
        s.on_producer_ready(job.key)
    who, planned = step(s)
    assert (who, planned.num_yielded, len(planned.pulls)) == (["a", "b", "c", "u0"], 1, 0), "u1 holds back the pulls"
    who, planned = step(s)
    assert (who, planned.num_yielded, len(planned.pulls)) == (["u0", "u1"], 3, 2)


def test_prompts_with_one_cached_prefix_take_its_blocks_once() -> None:
    s = _scheduler(9, num_blocks=20)
    add(s, first := in_lane(Lane.INTERACTIVE, generate("first", 16, 1)))
    step(s)
    add(s, *(batch(name, 20) for name in "ab"))
    step(s)
    prompt = first.request.prompt_tokens
    for number in range(2):
        mine = urgent(f"u{number}")
        add(s, replace(mine, request=replace(mine.request, prompt_tokens=(*prompt, number))))
    planned = step(s)[1]
    assert (planned.num_yielded, len(planned.starts)) == (0, 2), "9 blocks and 1, of which 14 are free, 3 to grow"
    s.check()


def test_a_block_that_two_victims_share_is_free_once_both_have_yielded() -> None:
    s = _scheduler(9, num_blocks=11)
    add(s, with_choices(batch("b", 8, num_prompt=12), 2))
    finish(s, s.plan().step, 50, 51)
    step(s)
    assert len(s.state.running) == 2
    add(s, in_lane(Lane.INTERACTIVE, generate("mine", 14, 2)))
    planned = step(s)[1]
    assert (planned.num_yielded, len(planned.starts)) == (2, 1)
    s.check()


def test_a_prompt_that_waits_for_leases_hides_no_pull_behind_it() -> None:
    s = _scheduler(9, num_blocks=16)
    add(s, in_lane(Lane.BATCH, prefill("p", 12)))
    step(s)
    add(s, batch("a", 20), batch("b", 20))
    for _ in range(5):
        step(s)
    add(s, in_lane(Lane.INTERACTIVE, generate("large", 24, 2)), pull := in_lane(Lane.INTERACTIVE, resume("x", 8)))
    s.on_producer_ready(pull.key)
    planned = step(s)[1]
    assert [str(granted.key.request) for granted in planned.pulls] == ["x"] and planned.num_yielded == 1


def test_yields_of_a_plan_without_a_step_are_in_the_next_record() -> None:
    s = _scheduler(1)
    add(s, batch("b"))
    step(s)
    add(s, job := in_lane(Lane.INTERACTIVE, resume("x", 4)))
    s.on_producer_ready(job.key)
    planned = s.plan()
    assert planned.num_yielded == 1 and planned.step is None
    s.kv_arrived(job.key, (SampledToken(1),), 0, 4)
    later = s.plan().step
    assert later is not None
    assert s.pacer.measured(StepResult(later.number, ()), 0.1).num_yielded == 1


def test_no_run_of_decodes_passes_the_moment_where_enough_could_yield() -> None:
    """The room that a batch request could give grows while it decodes."""
    s = _scheduler(9, num_blocks=16)
    for job in (in_lane(Lane.INTERACTIVE, generate("older", 16, 8)), batch("b")):
        sampling = SamplingParams(max_tokens=job.request.sampling.max_tokens)
        add(s, replace(job, request=replace(job.request, sampling=sampling)))
    step(s)
    assert s.run(8) is not None
    add(s, in_lane(Lane.INTERACTIVE, generate("mine", 22, 2)))
    assert step(s)[1].num_yielded == 0
    assert s.run(8) is None


def test_a_paused_sequence_is_served_as_an_interactive_one_in_time() -> None:
    s = _scheduler(1, most=3)
    add(s, batch("b"))
    step(s)
    add(s, *(urgent(f"u{number}", 2) for number in range(9)))
    order: list[str] = []
    for now in range(0, 99, 12):
        planned = s.plan(float(now))
        order += names(s, planned.step)
        finish(s, planned.step)
    assert order == ["u0", "u0", "u1", "u1", "b", "b", "b", "b", "b"], "30 s later it has a seat, and keeps it"
    s.check()


def test_a_preempted_sequence_of_a_low_priority_is_promoted_too() -> None:
    s = _scheduler(1)
    low = generate("low", 4, 9)
    add(s, replace(low, request=replace(low.request, priority=9)))
    step(s)
    s.state.preempt(next(iter(s.state.running)))
    add(s, *(generate(f"u{number}", 4, 2) for number in range(5)))
    order = []
    for now in (10.0, 20.0, 30.0, 40.0):
        planned = s.plan(now)
        order += names(s, planned.step)
        finish(s, planned.step)
    assert order == ["u0", "u0", "low", "low"]


def test_choices_of_a_promoted_sequence_are_served_alike() -> None:
    s = _scheduler(4)
    add(s, with_choices(batch("b", 8), 2))
    s.state.promote(next(iter(s.state.waiting)))
    finish(s, s.plan().step, 50, 51)
    assert [seq.is_promoted for seq in s.state.running] == [True, True]
    add(s, *(urgent(name) for name in "xyz"))
    assert step(s)[1].num_yielded == 0


def _pauses(updates: Iterable[SequenceUpdate]) -> list[Pauses]:
    """Return the pauses that updates report."""
    return [each.preemption.pauses for each in updates if each.preemption is not None and each.preemption.pauses.num]


def test_the_token_after_a_pause_reports_it() -> None:
    s = _scheduler(1, most=3)
    add(s, batch("b"))
    reported = []
    for now in range(9):
        if now in (1, 5):
            add(s, urgent(f"u{now}", 2))
        planned = s.plan(float(now))
        reported += [(now, pauses) for pauses in _pauses(finish(s, planned.step))]
    assert reported == [(3, Pauses(1, 2.0)), (7, Pauses(1, 2.0))]


def test_a_job_of_several_choices_reports_its_pause_once() -> None:
    s = _scheduler(4)
    add(s, with_choices(batch("b", 9, num_prompt=40), 2))
    finish(s, s.plan(1.0).step)
    s.state.now = 2.0
    s.state.preempt(next(iter(s.state.running)))
    updates = []
    for now in (4.0, 5.0):
        updates += finish(s, s.plan(now).step, 50, 51)
    assert any(update.branches for update in updates)
    reported = _pauses(part for update in updates for part in update.parts)
    assert reported == [Pauses(1, 2.0)]


def test_behind_a_prompt_that_waits_for_leases_nothing_yields_to_prompts() -> None:
    s = _scheduler(2, num_blocks=16)
    add(s, in_lane(Lane.BATCH, prefill("p", 12)))
    step(s)
    add(s, batch("a"), batch("b"))
    step(s)
    add(s, in_lane(Lane.INTERACTIVE, generate("large", 24, 2)), urgent("small"))
    who, planned = step(s)
    assert (who, planned.num_yielded) == (["a", "b"], 0)


def test_choices_that_wait_for_a_seat_pause_and_are_promoted() -> None:
    s = _scheduler(2)
    add(s, with_choices(batch("b", 3), 3))
    finish(s, s.plan(1.0).step, 50, 51, 52)
    (third,) = s.state.waiting
    add(s, *(urgent(f"u{number}", 2) for number in range(8)))
    reported = []
    for now in (2.0, 3.0, 4.0, 40.0, 41.0, 42.0, 43.0):
        planned = s.plan(now)
        reported += _pauses(finish(s, planned.step))
    assert third.is_promoted and reported[-1].num == 1 and reported[-1].seconds > 36


def test_blocks_that_decodes_take_in_the_same_plan_are_counted() -> None:
    s = _scheduler(9, num_blocks=14)
    add(s, *(batch(name) for name in "abc"))
    step(s)
    assert s.pool.num_free == 8, "and now each takes one"
    add(s, in_lane(Lane.INTERACTIVE, generate("mine", 6, 2)))
    who, planned = step(s)
    assert ("mine" in who, planned.num_yielded) == (True, 1)
