"""Test the arithmetic of step costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.step_cost import StepCost, StepFeatures

# Squares of less than 1e-150 s are zero in floating point, and no machine is so fast.
coefficients = st.just(0.0) | st.floats(1e-15, 1)
costs = st.builds(StepCost, coefficients, coefficients, coefficients, coefficients, coefficients)


def test_a_prediction_adds_up() -> None:
    cost = StepCost(1.0, 0.1, 0.01, 0.001, 0.0001)
    assert cost.predict(StepFeatures(3, 5, 7, 11)) == pytest.approx(1.0 + 0.3 + 0.05 + 0.007 + 0.0011)
    assert cost.predict(StepFeatures()) == 1.0


def test_a_chunk_costs_what_it_adds_to_a_step() -> None:
    cost = StepCost(1.0, 0.1, 0.0, 0.0, 0.01)
    pairs = sum(range(5, 9))  # the tokens at 4..7 attend to 5..8 tokens
    assert cost.chunk_s(4, 4) == pytest.approx(cost.predict(StepFeatures(4, 0, 0, pairs)) - 1.0)


@given(costs, st.integers(0, 100_000), st.integers(1, 10_000))
def test_the_longest_chunk_is_the_inverse_of_its_cost(cost: StepCost, start: int, num_tokens: int) -> None:
    seconds = cost.chunk_s(start, num_tokens)
    if seconds > 0:
        assert cost.chunk_tokens(start, seconds) == pytest.approx(num_tokens, rel=1e-6)
    assert cost.chunk_tokens(start, 0.0) == 0.0


def test_a_free_chunk_is_unbounded() -> None:
    assert StepCost(1.0, 0.0, 0.0, 0.0, 0.0).chunk_tokens(9, 0.5) == math.inf


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_coefficients_are_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        StepCost(0.0, 0.0, bad, 0.0, 0.0)
