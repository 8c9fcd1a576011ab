"""Test which metrics each kind of step adds to."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.step_cost import StepFeatures
from tandem.obs.metrics.metrics import HistogramSnapshot, Metrics
from tandem.sched.state.schedule_result import StepRecord
from tandem.worker.telemetry.counters import StepMetrics

DECODES = StepRecord(
    number=0,
    features=StepFeatures(num_decode_seqs=3),
    predicted_s=0.02,
    measured_s=0.03,
    target_s=0.0,
    num_budget_tokens=13,
    num_preempted=0,
    has_failed=False,
)


def counted(*records: StepRecord) -> dict[tuple[str, ...], float]:
    """Return the values other than 0 by name and attribute values; for a histogram, its number of observations."""
    metrics = Metrics()
    meter = StepMetrics(metrics)
    for record in records:
        meter.observe(record)
    found: dict[tuple[str, ...], float] = {}
    for family in metrics.collect():
        for values, point in family.points.items():
            name = family.instrument.name.removeprefix("tandem.")
            found[(name, *values)] = point.count if isinstance(point, HistogramSnapshot) else point
    return {name: value for name, value in found.items() if value}


def step(num_prefill_tokens: int, num_decode_seqs: int, **facts: object) -> StepRecord:
    features = StepFeatures(num_prefill_tokens=num_prefill_tokens, num_decode_seqs=num_decode_seqs)
    return replace(DECODES, features=features, **facts)  # type: ignore[arg-type]


def of_kind(kind: str) -> dict[tuple[str, ...], float]:
    return {(name, kind): 1 for name in ("steps", "step.duration", "step.predicted_duration")}


def test_a_step_is_of_one_kind() -> None:
    assert counted(DECODES) == {**of_kind("decode"), ("step.decode_tokens",): 3, ("step.budget_tokens",): 13}
    prefill = {("step.prefill_tokens",): 5, ("step.budget_tokens",): 13}
    assert counted(step(5, 0)) == {**of_kind("prefill"), **prefill}
    assert counted(step(5, 2)) == {**of_kind("mixed"), **prefill, ("step.decode_tokens",): 2}


def test_draft_tokens_are_no_prompt_tokens() -> None:
    metrics = counted(step(4, 2, num_drafted=4))
    assert metrics == {**of_kind("decode"), ("step.decode_tokens",): 2, ("step.budget_tokens",): 13}


def test_a_budget_counts_only_where_one_was_set() -> None:
    assert counted(step(13, 0))["step.saturated",] == 1
    assert ("step.saturated",) not in counted(step(12, 0), step(0, 3, num_budget_tokens=0))


def test_steps_over_target_and_preemptions_are_counted() -> None:
    metrics = counted(replace(DECODES, target_s=0.01), replace(DECODES, target_s=0.1, num_preempted=2, num_yielded=3))
    assert metrics["step.over_target",] == 1
    assert (metrics["preemptions",], metrics["lane.preemptions",]) == (2, 3)


def test_all_kinds_are_exported_before_the_first_step() -> None:
    metrics = Metrics()
    StepMetrics(metrics)
    (steps,) = [family for family in metrics.collect() if family.instrument.name == "tandem.steps"]
    assert dict(steps.points) == {("decode",): 0, ("prefill",): 0, ("mixed",): 0}
