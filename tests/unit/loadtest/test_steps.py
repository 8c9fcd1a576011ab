"""Step logs beside a load test: which steps count, and what they held."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.load.steps import INTERVALS, RecordedSteps, per_interval, read_steps, summarise, within
from loadtest.load.steps_markdown import steps_markdown
from tandem.core.errors import TandemError
from tests.unit.loadtest.made import STEPS, step, written


def log(directory: Path) -> RecordedSteps:
    return within(read_steps(written(directory, *STEPS)), 1000.5, 5.0)


def test_a_summary_is_of_the_steps_during_the_test(tmp_path: Path) -> None:
    found = summarise(log(tmp_path))
    assert found is not None
    assert (found.worker, found.pool, found.num_steps) == ("w1", "mixed", 4)
    assert found.prefill is not None and (found.prefill.p50, found.prefill.max) == (384.0, 512.0)
    assert found.decode is not None and (found.decode.p50, found.decode.max) == (4.0, 6.0)
    assert found.mixed_share == 1 / 4
    assert found.budget_use == pytest.approx(768 / 1024)
    assert found.over_target == 1 / 2
    assert (found.num_preempted, found.num_failed) == (2, 1)
    assert found.seconds.max == 1.0


def test_times_of_a_log_become_those_of_the_test(tmp_path: Path) -> None:
    assert [one.ended_s for one in log(tmp_path).steps] == [0.5, 1.5, 2.5, 3.0]


def test_a_worker_without_steps_has_a_row_without_figures(tmp_path: Path) -> None:
    empty = within(read_steps(written(tmp_path, *STEPS)), 5000.0, 1.0)
    assert summarise(empty) is None
    assert "| w1 | mixed | 0 | - |" in steps_markdown([empty])
    assert per_interval(empty) == ([0.0, 1.0], [0.0], [0.0])


def test_the_table_shows_what_iterations_held(tmp_path: Path) -> None:
    (row,) = steps_markdown([log(tmp_path)]).splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:7] == ["w1", "mixed", "4", "384 / 509 / 512", "4 / 6 / 6", "25.0%", "75.0%"]
    assert cells[8:] == ["50.0%", "2", "1"]


def test_tokens_of_iterations_over_time(tmp_path: Path) -> None:
    edges, prefill, decode = per_interval(log(tmp_path))
    assert (edges[0], edges[-1], len(edges)) == (0.5, 3.0, 5)
    assert prefill == [512.0, 256.0, 0.0, 0.0]
    assert decode == [0.0, 4.0, 0.0, 5.0]
    many = read_steps(written(tmp_path, *(step(float(at), 1, 0) for at in range(1000))))
    assert len(per_interval(many)[1]) == INTERVALS


def test_a_bad_line_is_named_and_a_last_one_without_an_end_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, *STEPS[:2], end="\n{oops}\n")
    with pytest.raises(TandemError, match=r"w1\.jsonl, line 4"):
        read_steps(path)
    assert len(read_steps(written(tmp_path, *STEPS, end="")).steps) == len(STEPS) - 1
