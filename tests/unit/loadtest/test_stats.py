"""Percentiles, goodput, ratios of pairs and agreement, on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.client.records import Record, Run, Step
from loadtest.common.stats import StatsPoint, agreement, meets, overhead, pair_ratio, percentile, summarise
from tandem.core.slo import Slo
from tests.unit.loadtest.made import stamped


def record(
    name: str = "r", stamps: tuple[float, ...] = (1.0,), group: str = "short", due_s: float = 0.0, **changes: object
) -> Record:
    return stamped(group, due_s, stamps, name=name, num_prompt_tokens=10, **changes)


def run(*records: Record, wall_s: float = 10.0) -> Run:
    return Run(system="s", workload="w", seed=0, turn=0, records=records, wall_s=wall_s)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_those_of_numpy(count: int, share: float) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share * 100)))


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_ttft_counts_from_when_the_request_was_due() -> None:
    late = record(due_s=1.0, sent_s=3.0, stamps=(4.0,))
    assert late.ttft_s == 3.0
    assert late.lateness_s == 2.0


def test_tokens_of_one_chunk_are_one_arrival() -> None:
    assert record(stamps=(1.0, 1.0, 1.5, 1.5, 1.5, 3.0)).gaps_s == (0.5, 1.5)


def test_gaps_are_pooled_over_requests_and_runs() -> None:
    first = run(record("a", (0.0, 1.0, 2.0)), record("b", (0.0, 5.0)))
    second = run(record("c", (0.0, 3.0)), wall_s=30.0)
    summary = summarise([first, second], Slo())
    assert summary is not None and summary.itl is not None
    assert (summary.itl.count, summary.itl.p50, summary.itl.max) == (4, 2.0, 5.0)
    assert summary.output_rate == pytest.approx(7 / 40)
    assert summary.prompt_rate == pytest.approx(30 / 40)


def test_classes_are_separate() -> None:
    summary = summarise([run(record("a", (1.0,)), record("b", (9.0,), group="long"))], Slo())
    assert summary is not None
    assert {group: spread.p50 for group, spread in summary.ttft_by_group.items()} == {"short": 1.0, "long": 9.0}


def test_goodput_needs_both_targets() -> None:
    steady = tuple(0.5 + 0.1 * i for i in range(41))
    one_stall = (*steady[:-1], steady[-1] + 5.0)
    three_stalls = (*steady[:-3], *(steady[-1] + 5.0 * i for i in (1, 2, 3)))
    records = [
        record("good", steady),
        record("late", tuple(at + 9 for at in steady)),
        record("one-stall", one_stall),
        record("three-stalls", three_stalls),
        record("failed", steady, error="500"),
    ]
    slo = Slo(ttft_s=1.0, itl_s=0.2)
    assert [meets(one, slo) for one in records] == [True, False, True, False, False]
    summary = summarise([run(*records, wall_s=4.0)], slo)
    assert summary is not None
    assert summary.good_rate == pytest.approx(2 / 4)
    assert summary.good_share == pytest.approx(2 / 5)


def test_nothing_answered_is_no_summary() -> None:
    assert summarise([run(record(error="refused", stamps=()))], Slo()) is None


def test_each_of_their_runs_is_paired_with_our_neighbours() -> None:
    """A B A B A on a machine that gets slower all the time: equal systems come out equal."""
    slowing = [1.0, 1.1, 1.21, 1.331, 1.4641]
    ours = [StatsPoint(float(i), slowing[i]) for i in (0, 2, 4)]
    theirs = [StatsPoint(float(i), slowing[i]) for i in (1, 3)]
    ratio = pair_ratio(ours, theirs)
    assert ratio is not None
    assert ratio.count == 4
    assert ratio.median == pytest.approx(1.0, abs=0.01)
    assert (ratio.least, ratio.greatest) == (pytest.approx(1 / 1.1), pytest.approx(1.1))


def test_a_run_without_a_neighbour_has_no_ratio() -> None:
    assert pair_ratio([], [StatsPoint(0.0, 1.0)]) is None
    assert pair_ratio([StatsPoint(0.0, 1.0)], []) is None
    only_before = pair_ratio([StatsPoint(0.0, 3.0)], [StatsPoint(1.0, 2.0)])
    assert only_before is not None
    assert (only_before.count, only_before.median) == (1, 1.5)


def test_pairs_between_which_the_machine_changed_are_void() -> None:
    ours = [StatsPoint(0.0, 1.0, speed=150.0), StatsPoint(2.0, 9.0, speed=100.0)]
    ratio = pair_ratio(ours, [StatsPoint(1.0, 2.0, speed=140.0)])
    assert ratio is not None
    assert (ratio.count, ratio.median, ratio.num_void) == (1, 0.5, 1)
    assert pair_ratio(ours[1:], [StatsPoint(1.0, 2.0, speed=140.0)]) is None


def test_answers_are_compared_by_tokens_where_both_sides_report_them() -> None:
    ours = [record("a", tokens=(1, 2, 3)), record("b", tokens=(1, 2)), record("c", tokens=(7,))]
    theirs = [record("a", tokens=(1, 2, 4)), record("b", tokens=(1, 2)), record("c", tokens=(7, 8))]
    found = agreement(ours, theirs)
    assert found.by_tokens
    assert (found.num_equal, found.num_compared) == (1, 3)
    assert found.first_differences == {"a": 2, "c": 1}


def test_answers_are_compared_by_text_otherwise() -> None:
    found = agreement([record("a", tokens=(1,), text="hat")], [record("a", text="ham")])
    assert not found.by_tokens
    assert found.first_differences == {"a": 2}


def test_failed_answers_are_not_compared() -> None:
    assert agreement([record("a", error="x")], [record("a")]).num_compared == 0


def step(num_decodes: int, num_prefill: int = 0, model_s: float = 9.0) -> Step:
    return Step(
        num_decodes=num_decodes,
        num_prefill_tokens=num_prefill,
        plan_s=0.1,
        model_s=model_s,
        batch_s=0.4,
        commit_s=0.2,
        stream_s=0.3,
    )


def test_overhead_is_all_but_the_model_of_full_decode_steps() -> None:
    held_up = step(33, model_s=999.0)
    found = overhead([step(32), step(40), held_up, step(8, model_s=1.0), step(32, 100, model_s=99.0)], 32)
    assert found is not None
    assert found.num_steps == 3
    assert found.share == pytest.approx(0.1)
    assert overhead([step(8)], 32) is None
