"""Test how a capacity model is corrected by late requests."""

from __future__ import annotations

import pytest

from tandem.scaling.model_correction import MOST, REST_SPANS, STEP, Correction


def factors_after(correction: Correction, shares: list[float], begin: float = 0.0) -> list[float]:
    """Return the factor after each span of a thousand requests, of which the given fraction is late."""
    factors = []
    correction.add(begin, 0, 0, had_enough=True)
    for i, share in enumerate(shares, start=1):
        correction.add(begin + 60.0 * i, round(1000 * share), 1000, had_enough=True)
        factors.append(correction.factor)
    return factors


def test_a_correction_rises_while_it_helps_and_decays_when_nothing_is_late() -> None:
    factors = factors_after(Correction(60.0, 0.01), [0.2, 0.1, 0.05, 0.005, 0.005])
    assert factors[:3] == pytest.approx([STEP, STEP**2, STEP**3])
    assert factors[2] > factors[3] > factors[4] > 1.0


def test_a_step_that_does_not_help_is_undone_and_not_tried_for_a_while() -> None:
    factors = factors_after(Correction(60.0, 0.01), [0.2] * (REST_SPANS + 3))
    assert factors[0] == pytest.approx(STEP)
    assert factors[1 : REST_SPANS + 2] == pytest.approx([1.0] * (REST_SPANS + 1))
    assert factors[REST_SPANS + 2] == pytest.approx(STEP)


def test_a_correction_is_bounded_and_ignores_chance() -> None:
    assert factors_after(Correction(60.0, 0.01), [0.9 * 0.7**i for i in range(10)])[-1] == MOST
    assert factors_after(Correction(60.0, 0.01), [0.015] * 5)[-1] == 1.0


def test_counts_with_too_few_workers_are_ignored() -> None:
    correction = Correction(60.0, 0.01)
    for i in range(50):
        correction.add(10.0 * i, 90, 100, had_enough=i % 5 != 0)
    assert correction.factor == 1.0
    for i in range(50, 60):
        correction.add(10.0 * i, 0, 100, had_enough=False)
    assert correction.factor == 1.0 and factors_after(correction, [0.2], begin=600.0) == pytest.approx([STEP])


def test_lateness_before_and_after_a_calm_span_is_not_compared() -> None:
    before, calm, after = factors_after(Correction(60.0, 0.01), [0.2, 0.0, 0.2])
    assert before > calm and after == calm * STEP
