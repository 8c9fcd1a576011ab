"""What `tandem simulate` wrote beside a load test: the same quantities, and nothing said that cannot be known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.load.load_report import Scope
from loadtest.load.report_file import NoReport, read_report
from loadtest.load.stats_collector import StatsCollector
from tandem.cli import main as tandem
from tandem.core.slo import Slo
from tests.unit.loadtest.made import record, reported

pytestmark = pytest.mark.slow
COUNT = 60
SLO = Slo(ttft_s=0.5, itl_s=0.04)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated") / "simulated.json"
    flags = ["--pools", "prefill=1,decode=1", "--rate", "5", "--slo", "ttft=500ms,itl=40ms", "--json", str(path)]
    assert tandem(["simulate", "--count", str(COUNT), *flags]) == 0
    return path


def measured(path: Path, slo: Slo = SLO, **facts: str) -> Path:
    """As `loadtest load` would tell the same requests of a server that takes 0.25 s to a token and then 0.02 s each."""
    tally = StatsCollector(slo)
    for number in range(COUNT):
        group = "short" if number % 10 < 7 else "medium" if number % 10 < 9 else "long"
        tally.ended(record(group, number / 5, 0.02, 0.02, 0.02, ttft_s=0.25), 0)
    named = {"workload": "mix", "seed": "0", "count": str(COUNT), "rate": "5.0", **facts}
    path.write_bytes(msgspec.json.encode(reported(tally, facts=named, slo=slo)))
    return path


def compared(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    capsys.readouterr()
    assert main(["compare", *map(str, paths)]) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {(scope, name): rest for scope, name, *rest in cells}


def test_a_simulated_run_has_the_shape_of_a_load_test(simulated: Path) -> None:
    written, report = json.loads(simulated.read_text())["report"], read_report(simulated)
    assert report.is_simulated and report.slo == SLO and report.name == "simulated 1 prefill + 1 decode on 2 x h200"
    assert [(scope.kind, scope.name) for scope in report.scopes] == [
        ("all", "all"), ("class", "long"), ("class", "medium"), ("class", "short"),
    ]  # fmt: skip
    whole, *classes = report.scopes
    assert whole.num_requests == whole.num_whole == COUNT and whole.num_good == round(written["good_share"] * COUNT)
    assert (whole.output_rate, whole.prompt_rate) == pytest.approx((written["output_rate"], written["prompt_rate"]))
    assert whole.good_rate == pytest.approx(written["good_rate"])
    for scope, group in zip(report.scopes, written["groups"], strict=True):
        assert {(name, found.p99) for name, found in scope.times.items()} == {
            (name, group[name]["p99"]) for name in ("ttft", "itl", "tpot", "e2e")
        }
        assert all(sum(number for _, number in found.buckets) == found.count for found in scope.times.values())

    def summed(field: str) -> float:
        return sum(getattr(scope, field) for scope in classes)

    for field in Scope.__struct_fields__:
        if field.startswith("num_") or field.endswith("_rate"):
            assert summed(field) == pytest.approx(getattr(whole, field)), field


def test_it_stands_beside_a_real_one_without_a_word_of_noise(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = compared(capsys, measured(tmp_path / "a.json"), simulated)
    assert "**B is simulated**" in text and "Not the same" not in text
    found = rows(text)
    assert {scope for scope, _ in found} >= {"all", "short", "medium", "long"}
    first, second, ratio, *judged = found["all", "TTFT p50"]
    theirs = read_report(simulated).scopes[0].times["ttft"].p50
    assert first == "250 ms" and ratio == f"{theirs / 0.25:.2f}" and second.endswith(" ms")
    assert judged == ["-", "-"]
    assert {name for (_, name), cells in found.items() if cells[-1] not in ("-", "so", "---:")} == {"good share"}


def test_other_workloads_and_targets_are_named(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = compared(capsys, simulated, measured(tmp_path / "a.json", Slo(ttft_s=2.0), rate="4.0"))
    assert "**A is simulated**" in text
    assert "**Not the same workload**: rate 5.0 and 4.0." in text
    assert "**Not the same targets**, so what is good differs: TTFT 500 ms, ITL 40 ms and TTFT 2 s." in text


@pytest.mark.nightly
def test_both_curves_are_plotted(simulated: Path, tmp_path: Path) -> None:
    chart = tmp_path / "c.svg"
    assert main(["compare", str(simulated), str(measured(tmp_path / "a.json")), "--chart", str(chart)]) == 0
    texts = ["".join(element.itertext()) for element in ElementTree.parse(chart).iter() if element.tag.endswith("text")]
    curves = [text for text in texts if text.startswith(("A: ", "B: "))]
    assert len(curves) == 2 * 2 * 4, "two sides, two measures, all requests and three classes"


def without(document: dict[str, Any], *path: str) -> dict[str, Any]:
    key, *rest = path
    return {name: without(value, *rest) if name == key and rest else value
            for name, value in document.items() if name != key or rest}  # fmt: skip


@pytest.mark.parametrize("path", [("slo",), ("report", "wall_s"), ("workload", "seed"), ("buckets",)])
def test_what_is_missing_is_named_with_its_file(simulated: Path, tmp_path: Path, path: tuple[str, ...]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(without(json.loads(simulated.read_text()), *path)))
    with pytest.raises(NoReport, match=rf"broken\.json is no report: .*`{path[-1]}`"):
        read_report(broken)
