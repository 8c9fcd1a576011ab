"""Test the ladder of step budgets: its rungs, when it moves, and what an allowance pays for."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.step_cost import StepCost
from tandem.sched.budget.step_sizer import LEAST_TOKENS, PATIENCE, PrefillBudget, StepBudget, ladder

COST = StepCost(20e-3, 1e-3, 1e-3, 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("max_tokens", "rungs"),
    [
        (512, (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)),
        (100, (8, 12, 16, 24, 32, 48, 64, 96, 100)),
        (9, (8, 9)),
        (8, (8,)),
        (7, (7,)),
    ],
)
def test_rungs(max_tokens: int, rungs: tuple[int, ...]) -> None:
    assert ladder(max_tokens) == rungs


def climbed(budget: StepBudget, num_tokens: float, num_steps: int = PATIENCE) -> int:
    for _ in range(num_steps):
        chosen = budget.choose(num_tokens)
    return chosen


def test_it_rises_after_patience_and_falls_at_once() -> None:
    budget = StepBudget(512)
    assert climbed(budget, 300.0, PATIENCE - 1) == LEAST_TOKENS
    assert budget.choose(300.0) == 256
    assert budget.choose(255.0) == 192
    assert climbed(budget, 270.0, 50) == 192, "256 would fit, but not with room to spare"
    assert climbed(budget, 290.0) == 256


def test_it_rises_only_as_far_as_fitted_all_the_time() -> None:
    budget = StepBudget(512)
    for i in range(PATIENCE):
        budget.choose(120.0 if i == 3 else 9000.0)
    assert budget.num_tokens == 96
    budget.choose(9000.0)
    budget.choose(50.0)
    assert budget.num_tokens == 48


def test_nothing_affordable_is_the_floor() -> None:
    budget = StepBudget(512)
    climbed(budget, 9000.0)
    assert budget.num_tokens == 512
    assert budget.choose(-1.0) == LEAST_TOKENS


@pytest.mark.parametrize("level", [60.0, 64.0, 130.0, 192.0, 258.0, 400.0, 512.0, 530.0])
def test_noise_around_any_level_does_not_make_it_swing(level: float) -> None:
    random = Random(level)
    budget = StepBudget(512)
    sizes = [budget.num_tokens, *(budget.choose(level * random.gauss(1, 0.03)) for _ in range(2000))]
    assert sum(a != b for a, b in pairwise(sizes)) <= 8, "each fall needs a deeper dip, each rise a long calm"


@given(st.lists(st.floats(-1e3, 1e4), max_size=60))
def test_it_is_always_on_a_rung_that_fits_or_on_the_floor(affordable: list[float]) -> None:
    budget = StepBudget(384)
    for num_tokens in affordable:
        chosen = budget.choose(num_tokens)
        assert chosen in budget.rungs
        assert chosen <= max(num_tokens, LEAST_TOKENS)


@given(st.integers(0, 20_000), st.integers(0, 2000), st.integers(0, 2000), st.floats(-1.0, 2.0))
def test_an_allowance_pays_for_what_it_has(start: int, num_requested: int, num_tokens: int, seconds: float) -> None:
    allowance = PrefillBudget(num_tokens, seconds, COST)
    fits = allowance.fit(start, num_requested)
    assert 0 <= fits <= min(num_requested, num_tokens)
    if fits:
        assert COST.chunk_s(start, fits) <= seconds * (1 + 1e-6)
    if fits < min(num_requested, num_tokens):
        assert COST.chunk_s(start, fits + 1) > seconds * (1 - 1e-6)
    left = allowance.less(start, fits)
    assert left.num_tokens == num_tokens - fits
    assert left.seconds == pytest.approx(seconds - COST.chunk_s(start, fits))


def test_a_chunk_is_the_shorter_the_later_it_begins() -> None:
    allowance = PrefillBudget(512, COST.chunk_s(0, 256), COST)
    sizes = [allowance.fit(start, 512) for start in (0, 1000, 4000, 16000)]
    assert sizes[0] == 256
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 32
