"""Test how a capacity model is corrected by late requests."""

from __future__ import annotations

from tandem.scaling.model_correction import REST_SPANS, STEP, Correction

SPAN_S = 60.0


def factors_after(correction: Correction, *shares_late: float) -> list[float]:
    """Return the factor after each span of 1,000 requests, of which the given fraction was late."""
    factors = []
    for share in shares_late:
        at = SPAN_S * (1 + len(factors))
        correction.add(at, 0, 0, had_enough=False)
        correction.add(at + SPAN_S, int(1000 * share), 1000, had_enough=True)
        factors.append(correction.factor)
    return factors


def test_the_factor_rises_with_lateness_and_decays_without() -> None:
    factors = factors_after(Correction(SPAN_S, 0.01), 0.2, 0.0, 0.0)
    assert factors[0] == STEP and STEP > factors[1] > factors[2] > 1


def test_a_step_that_does_not_help_is_undone_and_none_is_tried_for_a_while() -> None:
    factors = factors_after(Correction(SPAN_S, 0.01), 0.2, 0.2, *[0.2] * REST_SPANS, 0.2)
    assert factors[0] == STEP and factors[1:-1] == [1.0] * (1 + REST_SPANS) and factors[-1] == STEP


def test_lateness_before_and_after_a_calm_span_is_not_compared() -> None:
    before, calm, after = factors_after(Correction(SPAN_S, 0.01), 0.2, 0.0, 0.2)
    assert before > calm and after == calm * STEP


def test_spans_with_too_few_workers_are_ignored() -> None:
    correction = Correction(SPAN_S, 0.01)
    for number in range(10):
        correction.add(SPAN_S * number, 900, 1000, had_enough=False)
    assert correction.factor == 1.0
