"""Test how long a prompt waits for the steps of a busy worker."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tandem.core.config import Pool
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import HORIZON_STEPS, WorkerLoad
from tandem.routing.worker_speed import NOMINAL, WorkerSpeed
from tandem.routing.worker_view import WorkerView

COST = StepCost(5e-3, 1e-4, 1e-4, 0.0, 0.0)
FULL = 1000
"""Tokens of a full step, which takes 0.105 s."""


def view(*prompts: int, pool: Pool = "prefill", running: int = 0) -> WorkerView:
    """Return a worker with prompts of these tokens, all of one size and lane."""
    lanes = {"lane_tokens": (sum(prompts),) * 3, "lane_longest": (max(prompts, default=0),) * 3}
    load = WorkerLoad(
        num_queued_tokens=sum(prompts), num_horizon_tokens=HORIZON_STEPS * FULL, num_running=running, **lanes
    )  # type: ignore[arg-type]
    return WorkerView(WorkerRef(WorkerId("w"), Incarnation(1), ""), pool, "m", "f", load, step_cost=COST)


def wait_s(worker: WorkerView, num_tokens: int) -> float:
    return WorkerSpeed(worker, has_step_costs=True).wait_s(num_tokens, Lane.INTERACTIVE)


@pytest.mark.parametrize("num_tokens", [1, 10, 999, 5000])
def test_an_idle_worker_has_no_wait(num_tokens: int) -> None:
    assert wait_s(view(), num_tokens) == 0.0


def test_a_short_prompt_waits_for_half_a_step_and_for_the_prompts_that_fill_its_own() -> None:
    long = view(20_000)
    assert wait_s(long, 10) == pytest.approx(0.105 / 2 + 990 * 1e-4)
    assert wait_s(view(1000), 10) == pytest.approx(0.105 / 2), "nobody is left to fill its step"
    assert wait_s(view(400), 10) == pytest.approx(0.045 / 2)


def test_unreported_prompts_count_like_queued_ones() -> None:
    placed = replace(view(), unreported=(20_000,))
    assert wait_s(placed, 10) == pytest.approx(wait_s(view(20_000), 10))


def test_the_wait_grows_with_the_queue_and_is_at_most_all_of_it() -> None:
    for num_tokens in (5, 300, 2500, 30_000):
        waits = [wait_s(view(*[700] * num), num_tokens) for num in range(40)]
        assert all(more >= less - 1e-9 for less, more in pairwise(waits))
        assert waits[-1] <= 39 * 700 * 1e-4 + 30 * 5e-3


def test_a_decoding_worker_is_in_a_step_too() -> None:
    assert WorkerSpeed(view(pool="decode", running=10), has_step_costs=True).rest_s == pytest.approx((5e-3 + 10e-4) / 2)
    prompts = view(pool="prefill", running=10)
    assert WorkerSpeed(prompts, has_step_costs=True).rest_s == 0.0, "those are queued tokens"


def test_all_workers_cost_the_same_while_one_has_not_reported() -> None:
    assert (
        WorkerSpeed(view(), has_step_costs=False).cost is NOMINAL
        and WorkerSpeed(view(), has_step_costs=True).cost is COST
    )


def test_the_rest_is_whole_steps_after_the_one_in_progress() -> None:
    def left(worker: WorkerView) -> float:
        return WorkerSpeed(worker, has_step_costs=True).left_s

    assert left(view()) == 0.0 and left(view(600)) == 0.0, "nothing after the step under way"
    assert left(view(2_500)) == pytest.approx(2 * 5e-3 + 1_500 * 1e-4)
