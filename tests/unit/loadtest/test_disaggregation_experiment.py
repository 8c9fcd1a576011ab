"""The experiment's report: effects as they were, and said when they were not; never runs the experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.fidelity.experiment_report import (
    BEGIN,
    CHUNKED,
    END,
    MONOLITHIC,
    SPLIT,
    ExperimentOutcome,
    ExperimentPlace,
    chart,
    insert,
    markdown,
)
from loadtest.fidelity.predictions import Seen, Times


def times(ttft: float, gap: float, longest: float, span: float = 10.0) -> Times:
    """200 requests with one gap each but the first, whose gap is the longest; 400 tokens."""
    seen = {
        f"r{n}": Seen("short" if n % 2 else "long", 0.0, ttft if n % 2 else 9.0, span if n == 0 else span / 2)
        for n in range(200)
    }
    return Times(seen, [longest, *[gap] * 199], 400)


def outcome(topology: str, ttft: float, gap: float, longest: float, burst_s: float = 20.0) -> ExperimentOutcome:
    return ExperimentOutcome(topology, [times(ttft, gap, longest)], times(ttft, gap, longest, burst_s))


def place(chunked: ExperimentOutcome) -> ExperimentPlace:
    mono, split = outcome(MONOLITHIC, 1.0, 0.05, 2.0), outcome(SPLIT, 0.3, 0.01, 0.3)
    return ExperimentPlace("Here", "what ran", [mono, chunked, split])


def test_effects_that_hold_are_reported_as_numbers() -> None:
    text = markdown([place(outcome(CHUNKED, 0.4, 0.02, 0.2, burst_s=20.5))])
    assert "| monolithic | 1,000 / 1,000 | 5,000 / 9,000 |" in text
    assert "| 40 % and more | 60 % |" in text
    assert "| 5 and more | 10.0 |" in text
    assert "| within 4 % | -2.4 % |" in text
    assert "| more than 1 | 2.0 |" in text
    assert "**no**" not in text


def test_effects_that_do_not_hold_are_marked() -> None:
    text = markdown([place(outcome(CHUNKED, 0.7, 0.005, 1.0, burst_s=25.0))])
    assert "| 40 % and more | 30 % (**no**) |" in text
    assert "| 5 and more | 2.0 (**no**) |" in text
    assert "| within 4 % | -20.0 % (**no**) |" in text
    assert "| more than 1 | 0.5 (**no**) |" in text


def test_a_topology_that_did_not_run_has_no_effect() -> None:
    without = ExperimentPlace("There", "less", [outcome(MONOLITHIC, 1.0, 0.05, 2.0), outcome(CHUNKED, 0.4, 0.02, 0.2)])
    row = next(line for line in markdown([without]).splitlines() if line.startswith("| disaggregated: p99"))
    assert row.endswith("| - |")


def test_only_what_lies_between_the_marks_is_replaced() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = insert(document, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"
    assert insert(once, "newer") == once.replace("new", "newer")
    with pytest.raises(ValueError, match="no line"):
        insert("nothing", "new")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_chart_is_written(tmp_path: Path, name: str) -> None:
    chart([place(outcome(CHUNKED, 0.4, 0.02, 0.2))], tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000
