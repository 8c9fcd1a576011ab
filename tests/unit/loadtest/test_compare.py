"""The bootstrap on distributions whose spread is known, and what a comparison says of noise and of differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from loadtest.__main__ import main
from loadtest.common.bootstrap import ratio_intervals, share_ratio_interval
from loadtest.load.compare import markdown
from loadtest.load.comparison import compare, differing_facts
from loadtest.load.load_report import LoadReport
from loadtest.load.stats_collector import StatsCollector
from tandem.core.slo import Slo
from tests.unit.loadtest.made import failed, record, reported

# ---- the bootstrap


def sampled(seed: int, count: int, scale: float = 1.0) -> list[list[float]]:
    return [[value] for value in np.random.default_rng(seed).exponential(scale, size=count)]


@pytest.mark.nightly
def test_intervals_cover_the_truth_about_as_often_as_they_claim() -> None:
    """That fewer than 86 of 100 intervals of 95 % hold the truth has a chance below one in a thousand."""
    found = [ratio_intervals(sampled(2 * i, 200), sampled(2 * i + 1, 200), [0.5], seed=i)[0] for i in range(100)]
    covered = sum(one is not None and one.low <= 1 <= one.high for one in found)
    assert covered >= 86


def test_the_width_is_that_of_the_theory() -> None:
    """The median of n exponential values has a standard error of 1 / (sqrt(n) ln 2) of itself."""
    n = 2_000
    (one,) = ratio_intervals(sampled(1, n), sampled(2, n), [0.5], seed=0)
    assert one is not None
    expected = 2 * 1.96 * np.sqrt(2) / (np.sqrt(n) * np.log(2))
    assert one.high - one.low == pytest.approx(expected, rel=0.25)


def test_a_difference_is_found_at_both_percentiles() -> None:
    for one in ratio_intervals(sampled(1, 2_000, 2.0), sampled(2, 2_000), [0.5, 0.99], seed=0):
        assert one is not None and 1 < one.low < 2 < one.high * 1.1


def test_gaps_of_one_request_are_sampled_together() -> None:
    """Ten requests, each with a thousand equal gaps, know no more than ten values do."""
    values = np.random.default_rng(0).exponential(size=10)
    (alone,) = ratio_intervals([[v] for v in values], [[1.0]] * 10, [0.5], seed=0)
    (many,) = ratio_intervals([[v] * 1_000 for v in values], [[1.0]] * 10, [0.5], seed=0)
    assert alone is not None and many is not None
    assert many.high - many.low > 0.8 * (alone.high - alone.low)


def test_equal_seeds_give_equal_intervals() -> None:
    sides = sampled(1, 50), sampled(2, 50)
    assert ratio_intervals(*sides, [0.5], seed=4) == ratio_intervals(*sides, [0.5], seed=4)
    assert ratio_intervals(*sides, [0.5], seed=4) != ratio_intervals(*sides, [0.5], seed=5)


def test_a_side_without_values_has_no_interval() -> None:
    assert ratio_intervals([[], []], sampled(1, 5), [0.5, 0.99], seed=0) == [None, None]
    assert share_ratio_interval((0, 10), (5, 10), seed=0) is None


def test_shares_have_the_width_of_the_binomial() -> None:
    one = share_ratio_interval((500, 1_000), (500, 1_000), seed=0)
    assert one is not None and one.low < 1 < one.high
    assert one.high - one.low == pytest.approx(2 * 1.96 * np.sqrt(2 * 0.25 / 1_000) / 0.5, rel=0.2)


# ---- the comparison


def load(name: str, sample_seed: int, scale: float, count: int = 400, **facts: str) -> LoadReport:
    """Classes `a`, whose TTFT is `scale` times an exponential second, and `b`, which is the same in all."""
    chance, tally = np.random.default_rng(sample_seed), StatsCollector(Slo(ttft_s=1.0))
    for number in range(count):
        group = "ab"[number % 2]
        ttft_s = float(chance.exponential(scale if group == "a" else 1.0))
        tally.ended(record(group, float(number), *chance.exponential(0.02, size=8).tolist(), ttft_s=ttft_s), 0)
    tally.ended(failed("a", 0.0, "timeout"), 0)
    return reported(tally, name=name, facts={"workload": "mix", "seed": "0", **facts})


def verdicts(first: LoadReport, second: LoadReport) -> dict[tuple[str, str], str]:
    return {(row.scope, row.name): row.verdict for row in compare(first, second)}


@pytest.mark.slow
def test_a_difference_is_distinguished_from_noise() -> None:
    found = verdicts(load("x", 1, 1.0), load("y", 2, 0.25))
    assert found["a", "TTFT p50"] == "B is lower"
    assert found["a", "good share"] == "B is higher"
    assert found["b", "TTFT p50"] == found["b", "ITL p50"] == found["all", "ITL p99"] == "inside the noise"
    assert found["all", "out tok/s"] == "-"


@pytest.mark.slow
def test_a_test_against_itself_differs_in_nothing() -> None:
    one = load("x", 1, 1.0)
    rows = compare(one, one)
    assert {row.ratio for row in rows if row.first} == {1.0}
    assert {row.verdict for row in rows} == {"inside the noise", "-"}
    assert "All 27 differences that can be judged lie inside the noise." in markdown(one, one, rows)


@pytest.mark.slow
def test_nothing_is_reported_of_a_p99_of_few_requests() -> None:
    found = verdicts(load("x", 1, 1.0, count=60), load("y", 2, 0.01, count=60))
    assert found["a", "TTFT p99"] == "fewer than 100 requests"
    assert found["a", "TTFT p50"] == "B is lower"


def test_classes_of_one_side_only_are_left_out_and_a_single_one_is_printed_once() -> None:
    both, single = load("x", 1, 1.0), load("y", 2, 1.0, count=1)
    assert {scope for scope, _ in verdicts(both, single)} == {"all"}


def test_other_workloads_are_named() -> None:
    assert differing_facts(load("x", 1, 1.0), load("y", 1, 1.0)) == []
    assert differing_facts(load("x", 1, 1.0), load("y", 1, 1.0, seed="3", rate="2")) == ["seed 0 and 3", "rate - and 2"]


def files(directory: Path, *reports: LoadReport) -> Sequence[str]:
    paths = [directory / f"{place}.json" for place in range(len(reports))]
    for path, one in zip(paths, reports, strict=True):
        path.write_bytes(msgspec.json.encode(one))
    return [str(path) for path in paths]


@pytest.mark.slow
def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *files(tmp_path, load("x", 1, 1.0), load("y", 2, 0.25, seed="3"))]) == 0
    out = capsys.readouterr().out
    assert "## A x against B y" in out
    assert "**Not the same workload**: seed 0 and 3." in out
    (line,) = [line for line in out.splitlines() if line.startswith("| a | TTFT p50 |")]
    assert line.endswith("| B is lower |")


@pytest.mark.nightly
def test_the_command_plots_both(tmp_path: Path) -> None:
    paths, chart = files(tmp_path, load("x", 1, 1.0), load("y", 2, 0.25, seed="3")), tmp_path / "c.svg"
    assert main(["compare", *paths, "--chart", str(chart)]) == 0
    texts = {"".join(element.itertext()).strip() for element in ElementTree.parse(chart).iter()}
    assert {"TTFT: a", "ITL: b", "TTFT, log scale"} <= texts


def test_a_file_that_is_no_report_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("[]")
    assert main(["compare", *files(tmp_path, load("x", 1, 1.0)), str(tmp_path / "bad.json")]) == 1
    assert "bad.json is no report" in capsys.readouterr().err
