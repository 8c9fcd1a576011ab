"""Test the predicted time to first token, and the rejections based on it."""

from __future__ import annotations

import pytest

from tandem.admission.ttft_predictor import SLACK, PrefillWorkerLoad, TtftForecast, forecast, queue_full, ttft_error
from tandem.core.errors import ErrorKind
from tandem.core.step_cost import StepCost

COST = StepCost(10e-3, 1e-3, 0.0, 0.0, 0.0)
"""A step of 90 tokens takes 0.1 s: 900 tokens per second."""


def test_a_prompt_waits_for_prompts_ahead_and_its_own_computation() -> None:
    one, other = PrefillWorkerLoad(COST, 90, 0), PrefillWorkerLoad(COST, 90, 450)
    assert one.rate == pytest.approx(900)
    expected = forecast([other], 900, 180)
    assert expected is not None
    assert expected.wait_s == pytest.approx(1.5) and expected.prefill_s == pytest.approx(0.2)
    both = forecast([one, other], 900, 180)
    assert both is not None and both.wait_s == pytest.approx(0.5), "two share what waits; it goes where less is"
    assert forecast([], 900, 180) is None


def test_a_long_prompt_costs_more_attention() -> None:
    worker = PrefillWorkerLoad(StepCost(0.0, 0.0, 0.0, 0.0, 1e-6), 512, 0)
    assert worker.seconds(2000) == pytest.approx(4 * worker.seconds(1000), rel=1e-3)


@pytest.mark.parametrize(
    ("target_s", "deadline_s", "reason"),
    [
        (0.0, None, None),
        (4.0 / SLACK, None, None),
        (3.9 / SLACK, None, "predicted_ttft"),
        (0.0, 4.0, None),
        (0.0, 3.9, "deadline"),
        (3.9 / SLACK, 3.9, "deadline"),
        (4.0, 3.9, "deadline"),
    ],
)
def test_a_late_prompt_is_rejected_with_its_reason(
    target_s: float, deadline_s: float | None, reason: str | None
) -> None:
    error = ttft_error(TtftForecast(3.0, 1.0), target_s, deadline_s)
    assert (None if error is None else error.reason) == reason
    if error is not None:
        assert error.kind is ErrorKind.SLO_MISS and error.kind.http == 503 and error.retry_after_s == 1.0


def test_a_rejection_has_a_retry_time() -> None:
    late = ttft_error(TtftForecast(30.0, 1.0), 0.0, 11.0)
    assert late is not None and late.retry_after_s == pytest.approx(20.0)
    full = queue_full(7, TtftForecast(12.0, 1.0))
    assert full.reason == "queue_full" and full.kind is ErrorKind.OVERLOADED and full.retry_after_s == 12.0
    assert queue_full(7, None).retry_after_s == 1.0
