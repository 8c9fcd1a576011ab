"""Test the report of how fast running answers spread."""

from __future__ import annotations

import pytest

from loadtest.cluster.spread import RUNS, SpreadRun, good_after, report


def run(*gaps_s: float, num_moves: int = 0) -> SpreadRun:
    return SpreadRun(gaps_s, max(gaps_s), num_moves, 2.0 * len(gaps_s), ())


CALM = run(0.009, 0.010, 0.030, 0.010)


@pytest.mark.parametrize(
    ("gaps_s", "after"),
    [
        ((0.010, 0.012, 0.010, 0.010), "0"),
        ((0.020, 0.010, 0.010, 0.010), "2"),
        ((0.020, 0.010, 0.013, 0.010), "6"),
        ((0.010, 0.010, 0.010, 0.020), "never"),
    ],
)
def test_a_spread_has_ended_with_the_last_bad_window(gaps_s: tuple[float, ...], after: str) -> None:
    assert good_after(run(*gaps_s), CALM) == after


def test_a_report_has_a_row_for_each_run_that_was_measured() -> None:
    names = list(RUNS)[:2]
    lines = report({names[0]: CALM, names[1]: run(0.02, 0.0101, num_moves=3)}).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| no drain | 9.0 | 10.0 | 30.0 |  |  |  | 30.0 | 0 | 8.0 |")
    assert lines[3].startswith("| `gateway.rebalance=off` | 20.0 | 10.1 |  |  |  | 2 | 20.0 | 3 | 4.0 |")
