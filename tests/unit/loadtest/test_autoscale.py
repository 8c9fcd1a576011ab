"""A day made of a recorded hour, and what a table of autoscalers concludes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.cluster.autoscale import report_text, verdict
from loadtest.cluster.autoscale_run import LOADS, AutoscaleOutcome, AutoscalerConfig, run
from loadtest.cluster.diurnal_load import Day, requests
from tandem.core.slo import Slo
from tandem.workload.trace_entry import PromptBlocks, TraceEntry

HOUR = [TraceEntry(i * 1_000_000, PromptBlocks(60, (i, i + 1), 50), 5) for i in range(601)]


def test_a_day_keeps_the_number_of_its_curve_and_all_in_order() -> None:
    day = Day(num_copies=4, lasts_s=1200.0, low=0.25)
    scheduled = list(requests(day, HOUR))
    assert all(one.due_s <= other.due_s for one, other in pairwise(scheduled))
    assert [item.request.id for item in scheduled] == [f"r{i}" for i in range(len(scheduled))]
    quarters = Counter(int(item.due_s // 300) for item in scheduled)
    assert scheduled[-1].due_s < 1200.0 and len(scheduled) == pytest.approx(4 * 1200 * 0.625, rel=0.05)
    assert quarters[1] + quarters[2] == pytest.approx(2 * (quarters[0] + quarters[3]), rel=0.35)
    assert [day.share(at) for at in (0.0, 600.0, 1200.0)] == pytest.approx([0.25, 1.0, 0.25])


def test_a_day_is_a_function_of_its_seed_and_copies_share_no_prompt() -> None:
    day = Day(num_copies=2, lasts_s=300.0, low=1.0)
    first, again = list(requests(day, HOUR)), list(requests(day, HOUR))
    assert [scheduled.due_s for scheduled in first] == [scheduled.due_s for scheduled in again] and first == again
    assert [scheduled.due_s for scheduled in requests(replace(day, seed=1), HOUR)] != [
        scheduled.due_s for scheduled in first
    ]
    assert len({scheduled.request.prompt_tokens[:50] for scheduled in first}) == len(first) and 600 <= len(first) <= 602


def test_autoscalers_are_parsed_and_printed() -> None:
    for text, shown in (("planner", "planner"), ("queue=2:16", "queue, 2 and 16 each"), ("fixed=8+3", "8 + 3")):
        assert str(AutoscalerConfig.parse(text)) == shown
    for text in ("plan", "queue=2", "fixed=8:3", "planner=1", "fixed=a+1"):
        with pytest.raises(ValueError):
            AutoscalerConfig.parse(text)


def outcome(config: str, gpu_hours: float, good_share: float) -> AutoscaleOutcome:
    return AutoscaleOutcome(
        config=AutoscalerConfig.parse(config), percentile=99.0, num_requests=1000, gpu_hours=gpu_hours,
        good_share=good_share,
        worst_share=good_share - 0.005,
        late_share=0.0, late_gap_share=0.0, ttft_p99_s=1.0, itl_p99_s=0.02, mean_prefill=1.0, mean_decode=1.0,
        most_prefill=1, most_decode=1, wall_s=1.0,
    )  # fmt: skip


def test_the_planner_is_compared_with_what_costs_no_more_and_with_what_is_enough() -> None:
    outcomes = [
        outcome("planner", 20.0, 0.992), outcome("fixed=3+2", 19.0, 0.95), outcome("fixed=4+1", 20.0, 0.96),
        outcome("fixed=5+2", 25.0, 0.991), outcome("fixed=6+2", 30.0, 0.999), outcome("queue=2:16", 18.0, 0.9),
    ]  # fmt: skip
    text = verdict(outcomes, Slo(1.0, 0.1))
    assert "no more GPU hours is 4 + 1: 96.00%" in text and "99.20% of the planner's" in text
    assert "good over the day is 5 + 2 with 25.0 GPU hours: the planner, with 99.20%, takes 20.0% fewer" in text
    assert "in every tenth of it is 6 + 2 with 30.0 GPU hours: the planner, with 98.70%, takes 33.3% fewer" in text
    assert report_text(outcomes, Slo()).count("\n|") == 7
    assert verdict(outcomes[1:], Slo()) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(LOADS))
@pytest.mark.parametrize("config", ["planner", "queue=2:16", "fixed=2+1"])
def test_a_minute_of_each_load(name: str, config: str) -> None:
    """Every request ends and all books balance, or `run` raises."""
    load = LOADS[name]
    trace = Path(os.environ.get("TANDEM_TRACES", "")) / load.trace
    if not os.environ.get("TANDEM_TRACES") or not trace.is_file():
        pytest.skip(f"no {load.trace} in the folder that TANDEM_TRACES names")
    minute = replace(load, day=Day(num_copies=1, lasts_s=60.0, low=0.5))
    done = run(minute, trace, AutoscalerConfig.parse(config))
    assert done.num_requests > 10 and 0 < done.gpu_hours < 2 and done.good_share > 0.5
