"""Test how many prompt tokens a worker accepts, by lane, and without the tokens that its cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.sched.state.backlog import horizon_tokens
from tandem.sched.state.limits import SchedulerLimits
from tests.effort import effort
from tests.unit.sched.simulated_worker import TRUTH, SimulatedWorker

LIMITS = SchedulerLimits(max_num_batched_tokens=512, max_num_seqs=64, max_model_len=100_000, queue_horizon_s=0)


def worker(budget: int = 512) -> SimulatedWorker:
    one = SimulatedWorker(budget=budget)
    one.scheduler.state.limits = replace(one.scheduler.state.limits, queue_horizon_s=0)
    return one


def load_of(one: SimulatedWorker) -> WorkerLoad:
    return one.scheduler.load()


def refused(one: SimulatedWorker, num_prompt: int, lane: Lane = Lane.INTERACTIVE) -> bool:
    before = one.scheduler.num_sequences
    try:
        one.add_request(num_prompt, lane=lane)
    except TandemError as error:
        assert error.kind is ErrorKind.OVERLOADED and error.retry_after_s
        assert one.scheduler.num_sequences == before
        one.scheduler.check()
        return True
    return False


def test_a_long_prompt_alone_is_taken_and_short_ones_beside_it() -> None:
    one = worker()
    assert not refused(one, 9000)
    assert refused(one, 9000), "it would wait for eighteen steps"
    assert [refused(one, 200) for _ in range(7)] == [False] * 6 + [True]
    one.step()
    assert not refused(one, 200), "a step's worth is planned"
    one.run()
    assert not refused(one, 9000)


def test_a_second_long_prompt_is_taken_when_the_first_has_two_steps_left() -> None:
    one = worker()
    assert not refused(one, 4096)
    steps = 0
    while refused(one, 5000):
        one.step()
        steps += 1
    assert 4096 - 512 * steps == 2 * 512


def test_prompts_of_each_size_are_taken_beside_longer_ones() -> None:
    one = worker()
    for num_prompt in (16_000, 4000):
        assert not refused(one, num_prompt) and refused(one, num_prompt)
    assert [refused(one, 700) for _ in range(3)] == [False, False, True], "1,024 beside the longest"
    assert refused(one, 4000) and refused(one, 20_000), "these wait for the shorter ones"
    assert [refused(one, 200) for _ in range(7)] == [False] * 6 + [True]


def test_an_idle_worker_reports_as_many_figures_as_a_busy_one() -> None:
    one = worker()
    idle = load_of(one)
    assert not refused(one, 700)
    busy = load_of(one)
    for name in ("lane_tokens", "lane_longest", "size_tokens", "size_longest"):
        assert len(getattr(idle, name)) == len(getattr(busy, name)), name
        assert not any(getattr(idle, name)) and any(getattr(busy, name)), name
    assert idle.num_horizon_tokens == busy.num_horizon_tokens > 0


@effort(100)
@given(
    st.lists(st.tuples(st.integers(1, 30_000), st.sampled_from(Lane), st.booleans()), max_size=30),
    st.sampled_from([64, 512]),
)
def test_worker_and_gateway_agree_on_what_is_taken(jobs: list[tuple[int, Lane, bool]], budget: int) -> None:
    """Worker and gateway agree with a current load report, and with one that is as old as the last step."""
    one = worker(budget)
    known, coming = load_of(one), list[tuple[int, Lane]]()
    for num_prompt, lane, steps in jobs:
        if steps:
            one.step()
            known, coming = load_of(one), []
        takes = load_of(one).takes(num_prompt, lane)
        above = [tokens for tokens, other in coming if other <= lane]
        if len(above) == len(coming):
            assert known.takes(num_prompt, lane, above) == takes
        assert refused(one, num_prompt, lane) != takes
        if takes:
            coming.append((num_prompt, lane))


def test_what_lower_lanes_have_queued_keeps_no_higher_one_out() -> None:
    one = worker()
    for _ in range(5):
        assert not refused(one, 250, Lane.BATCH)
    assert refused(one, 250, Lane.BATCH)
    assert not refused(one, 250, Lane.STANDARD) and not refused(one, 250)
    load = load_of(one)
    assert load.lane_tokens == (250, 500, 1750) and load.lane_longest == (250, 250, 250)


def test_what_the_cache_holds_need_not_be_computed() -> None:
    one = worker()
    one.add_request(1600, text=7)
    one.run()
    for _ in range(20):
        one.add_request(1600, text=7)
    assert load_of(one).lane_tokens[0] == 20 * 16


def test_an_estimate_from_a_load_equals_the_worker_s_own() -> None:
    load = WorkerLoad(lane_tokens=(900, 900, 900), lane_longest=(800, 800, 800), num_horizon_tokens=1024)
    assert load.takes(924, Lane.INTERACTIVE) and load.takes(900, Lane.INTERACTIVE)
    assert not load.takes(300, Lane.INTERACTIVE, inflight=(700,))
    assert load.takes(300, Lane.INTERACTIVE, inflight=(20,)) and load.takes(300, Lane.INTERACTIVE, inflight=(600,))
    assert WorkerLoad().takes(10**6, Lane.BATCH), "a worker that says nothing takes any number"


@pytest.mark.parametrize(
    ("horizon_s", "cost", "expected"),
    [
        (None, TRUTH, 0),
        (1.0, StepCost(0.0, 0.0, 0.0, 0.0, 0.0), 1024),
        (0.0, StepCost(0.0, 1e-3, 0.0, 0.0, 0.0), 1024),
        (1.024, StepCost(0.0, 1e-3, 0.0, 0.0, 0.0), 1024),
        (1e-6, StepCost(0.0, 1e-3, 0.0, 0.0, 0.0), 1),
        (1.0, StepCost(0.488, 1e-3, 0.0, 0.0, 0.0), 512),
    ],
)
def test_a_horizon_of_time_is_so_many_tokens_in_full_steps(
    horizon_s: float | None, cost: StepCost, expected: int
) -> None:
    assert horizon_tokens(replace(LIMITS, queue_horizon_s=horizon_s), cost) == expected
