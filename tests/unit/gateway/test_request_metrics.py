"""Test the metrics of answered requests: exact counts, under a bounded number of label values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.slo import Slo
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.telemetry.token_timing import TokenTiming
from tandem.gateway.telemetry.usage import Usage
from tandem.obs.metrics.metrics import OTHER, HistogramSeries, HistogramSnapshot, Metrics, total
from tandem.orchestration.phase_ledger import StageSeconds
from tandem.sched.state.slo_targets import LatencyTargets
from tests.unit.gateway.records import record

TARGETS = LatencyTargets(interactive=Slo(0.5, 0.05), standard=Slo(itl_s=0.05))
RECORD = record(
    endpoint="completion",
    usage=Usage(10, 21, 4),
    total_s=1.0,
    first_token_s=0.2,
    token_s=0.04,
    longest_gap_s=0.06,
    num_gaps=20,
    num_late_gaps=1,
    stages=StageSeconds(receive=0.1, prefill=0.1, decode=0.8),
)


def points(metrics: Metrics, name: str) -> dict[tuple[str, ...], Any]:
    found = [family.points for family in metrics.collect() if family.instrument.name == name]
    return dict(found[0]) if found else {}


def metrics_of(*records: RequestRecord, max_values: int = 100) -> Metrics:
    metrics = Metrics(max_values)
    measures = RequestMetrics(metrics, TARGETS)
    for each in records:
        measures.answered(each)
    return metrics


def test_one_answer_is_counted_once_everywhere() -> None:
    metrics = metrics_of(RECORD)
    of = ("text_completion", "tiny", "acme", "interactive")
    assert points(metrics, "tandem.requests") == {("completion", "finished", "interactive", "acme"): 1}
    assert points(metrics, "tandem.prompt_tokens") == {("remote", "acme"): 10}
    assert points(metrics, "tandem.cached_prompt_tokens") == {("remote", "acme"): 4}
    assert points(metrics, "tandem.output_tokens") == {("remote", "acme"): 21}
    assert points(metrics, "tandem.placements") == {("remote", ""): 1}
    usage = points(metrics, "gen_ai.client.token.usage")
    assert {values: series.sum for values, series in usage.items()} == {(*of, "input"): 10, (*of, "output"): 21}
    (duration,) = points(metrics, "gen_ai.server.request.duration").items()
    assert duration[0] == (*of, "") and duration[1].sum == 1.0
    (mean,) = points(metrics, "gen_ai.server.time_per_output_token").items()
    assert mean[0] == of and mean[1].sum == 0.04
    stages = points(metrics, "tandem.request.stage.duration")
    assert {values: series.sum for values, series in stages.items()} == {
        (stage, "interactive", "tiny"): seconds
        for stage, seconds in (("receive", 0.1), ("queue", 0.0), ("prefill", 0.1), ("decode", 0.8))
    }
    assert points(metrics, "tandem.request.retries") == {(): 0}


def test_failed_requests_are_not_in_the_latencies_of_finished_ones() -> None:
    lost = replace(RECORD, outcome="worker_lost", error="gone", num_retries=3)
    metrics = metrics_of(lost, replace(lost, outcome="cancelled", num_retries=0))
    (lost_key, cancelled_key) = points(metrics, "gen_ai.server.request.duration")
    assert (lost_key[-1], cancelled_key[-1]) == ("worker_lost", "cancelled")
    assert not points(metrics, "gen_ai.server.time_per_output_token")
    assert points(metrics, "tandem.request.retries") == {(): 3}
    assert total(points(metrics, "tandem.output_tokens").values()) == 42


def test_a_request_without_placement_has_no_path() -> None:
    refused = replace(RECORD, outcome="overloaded", path="", reason="queue_full", usage=Usage(10, 0, None))
    metrics = metrics_of(refused, replace(refused, usage=Usage(0, 0, None)))
    assert points(metrics, "tandem.prompt_tokens") == {("none", "acme"): 10}
    assert not points(metrics, "tandem.placements")
    assert "queue" not in {stage for stage, *_ in points(metrics, "tandem.request.stage.duration")}


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, {"ttft": "true", "itl": "true", "both": "true"}),
        ({"first_token_s": 0.6}, {"ttft": "false", "itl": "true", "both": "false"}),
        ({"num_late_gaps": 2}, {"ttft": "true", "itl": "false", "both": "false"}),
        ({"outcome": "kv_lost"}, {"ttft": "false", "itl": "false", "both": "false"}),
        ({"outcome": "overloaded", "path": ""}, {"ttft": "false", "itl": "false", "both": "false"}),
        ({"outcome": "cancelled"}, {}),
        ({"outcome": "quota_exceeded"}, {}),
        ({"outcome": "invalid_request"}, {}),
        ({"first_token_s": None, "num_gaps": 0, "num_late_gaps": 0}, {"ttft": "true", "itl": "true", "both": "true"}),
        ({"lane": "standard", "first_token_s": 99.0}, {"itl": "true", "both": "true"}),
        ({"lane": "batch"}, {}),
    ],
)
def test_slo_targets_are_met_or_missed(changed: dict[str, Any], met: dict[str, str]) -> None:
    """A twentieth of a request's gaps may be late."""
    ended = replace(RECORD, **changed)
    found = points(metrics_of(ended), "tandem.slo.requests")
    assert found == {(ended.lane, slo, is_met): 1 for slo, is_met in met.items()}


def test_slo_targets_are_exported() -> None:
    assert points(metrics_of(), "tandem.slo.target") == {
        ("interactive", "ttft"): 0.5,
        ("interactive", "itl"): 0.05,
        ("standard", "itl"): 0.05,
    }


def test_admissions() -> None:
    metrics = Metrics()
    measures = RequestMetrics(metrics)
    measures.admitted(Lane.BATCH, "acme")
    measures.refused(Lane.BATCH, "acme", TandemError(ErrorKind.QUOTA, "no", reason="requests_per_minute"))
    measures.refused(Lane.BATCH, "acme", TandemError(ErrorKind.NO_WORKER, "no"))
    assert points(metrics, "tandem.admissions") == {
        ("admitted", "", "batch", "acme"): 1,
        ("refused", "requests_per_minute", "batch", "acme"): 1,
        ("refused", "no_worker", "batch", "acme"): 1,
    }


def test_a_sampled_answer_is_an_exemplar() -> None:
    metrics = Metrics()
    measures = RequestMetrics(metrics)
    measures.answered(replace(RECORD, trace="ab" * 16))
    labels = ("chat", "tiny", "acme", Lane.BATCH)
    measures.begun(*labels, 0.2, "cd" * 16)
    measures.begun(*labels, 0.3, "")
    (duration,) = points(metrics, "gen_ai.server.request.duration").values()
    assert [exemplar.trace for exemplar in duration.exemplars.values()] == ["ab" * 16]
    (first,) = points(metrics, "gen_ai.server.time_to_first_token").values()
    assert (first.count, [exemplar.value for exemplar in first.exemplars.values()]) == (2, [0.2])


def test_metric_series_are_bounded() -> None:
    """A thousand tenants and models: the first ones have their own label values, and the others share one."""
    records = [replace(RECORD, tenant=f"t{i}", model=f"m{i}") for i in range(1000)]
    metrics = metrics_of(
        *records, *(replace(RECORD, model="", outcome="model_not_found") for _ in range(10)), max_values=5
    )
    for family in metrics.collect():
        assert len(family.points) <= 6 * 6 * 3 * 2
        for name in {"tenant", "gen_ai.request.model"} & set(family.instrument.attributes):
            values = {values[family.instrument.attributes.index(name)] for values in family.points}
            assert values <= {*(f"{name[0] if name == 'tenant' else 'm'}{i}" for i in range(5)), OTHER}
    assert total(points(metrics, "tandem.requests").values()) == 1010


def test_each_choice_has_its_own_token_rate() -> None:
    times = iter([1.0, 2.0, 2.5, 2.75, 6.5])
    firsts: list[float] = []
    pace = TokenTiming(lambda: next(times), HistogramSeries((0.5, 1.0)), 3.0, firsts.append)
    assert pace.mean_s is None and pace.first_at is None
    for choice in (0, 1, 0, 1, 0):
        pace.on_token_sent(choice)
    pace.end()
    assert firsts == [1.0] == [pace.first_at]
    assert (pace.num_gaps, pace.num_late, pace.longest_s) == (3, 1, 4.0)
    assert pace.mean_s == pytest.approx((1.5 + 0.75 + 4.0) / 3)
    assert HistogramSnapshot(tuple(pace.gaps.counts), pace.gaps.sum, {}).counts == (0, 1, 2)


def test_a_long_answer_s_gaps_are_counted_while_it_lasts() -> None:
    times = iter(range(4000))
    pace = TokenTiming(lambda: float(next(times)), HistogramSeries((0.5, 2.0)), 0.5, lambda at: None)
    for _ in range(4000):
        pace.on_token_sent(0)
    assert sum(pace.gaps.counts) > 3600
    pace.end()
    assert (pace.gaps.counts, pace.gaps.sum) == ([0, 3999, 0], 3999.0)
    assert (pace.num_gaps, pace.num_late, pace.mean_s) == (3999, 3999, 1.0)


def test_without_a_target_no_gap_is_late() -> None:
    times = iter([0.0, 1e6])
    pace = TokenTiming(lambda: next(times), HistogramSeries(()), 0.0, lambda at: None)
    for _ in range(2):
        pace.on_token_sent(0)
    pace.end()
    assert pace.num_late == 0 and pace.num_gaps == 1
