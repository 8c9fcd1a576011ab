"""The order of a bench's runs, what its report says of them, and the files that it leaves."""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.bench.bench import Turn, schedule
from loadtest.bench.report import BenchRun, markdown, report_to
from loadtest.bench.report_command import pooled
from loadtest.bench.systems_under_test import is_steady
from loadtest.client.records import Probe, Run
from loadtest.peers.install import required_requirements
from tandem.core.slo import Slo
from tests.unit.loadtest.made import record


def test_two_systems_alternate_and_the_first_is_last_too() -> None:
    order = schedule(["a", "b"], [7], 2)
    assert "".join(turn.system for turn in order) == "ababa"
    assert order[:2] == [Turn("a", 7, 0), Turn("b", 7, 0)]
    assert order[-1] == Turn("a", 7, 2)


def test_several_seeds_alternate_without_a_last_one() -> None:
    order = schedule(["a", "b"], [0, 1, 2], 1)
    assert [(turn.system, turn.seed) for turn in order] == [(s, seed) for seed in (0, 1, 2) for s in "ab"]


def test_one_system_alone_is_just_repeated() -> None:
    assert [turn.turn for turn in schedule(["a"], [0], 3)] == [0, 1, 2]


def run(system: str, turn: int, began: float, gap_s: float, **changes: object) -> Run:
    tokens = (1, 2, 3) if system == "a" else (1, 2, 4)
    return Run(
        system=system,
        workload="decode",
        seed=0,
        turn=turn,
        records=(record("single", 0.0, gap_s, gap_s, ttft_s=0.25, tokens=tokens, **changes),),
        began=began,
        wall_s=1.0,
        before=Probe(gflops=140.0, read_gbs=25.0),
        after=Probe(gflops=150.0, read_gbs=26.5),
    )


def bench(*more: Run) -> BenchRun:
    runs = (run("a", 0, 0.0, 0.01), run("b", 0, 1.0, 0.02), run("a", 1, 2.0, 0.01), *more)
    return BenchRun(systems=("a", "b"), runs=runs, facts={"threads": "2"})


def test_a_report_compares_the_first_system_with_the_others() -> None:
    text = markdown(bench(), Slo(ttft_s=0.5, itl_s=0.015))
    assert "| a | 2 | 250 / 250 / 250 | 10.0 / 10.0 / 10.0 / 10.0 | 100.0 |" in text
    assert "0.50 (0.50-0.50, n=2)" in text
    assert "- b: 0 of 1 answers have equal tokens, first single-0 at 2." in text
    assert "Probe: 140-150 GFLOP/s, 25.0-26.5 GB/s." in text
    a, b = (next(line for line in text.splitlines() if line.startswith(f"| {name} |")) for name in "ab")
    assert a.split("|")[-3].strip() == "100%"
    assert b.split("|")[-3].strip() == "0%"


def arguments(directory: Path, **changes: object) -> argparse.Namespace:
    given = {"json": None, "chart": None, "slo_ttft_ms": None, "slo_itl_ms": None}
    return argparse.Namespace(**{**given, **changes})


def test_a_failed_run_counts_for_nothing_and_fails_the_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = bench(run("b", 1, 3.0, 9.9, error="2 of 3 tokens"))
    assert report_to(broken, arguments(tmp_path)) == 1
    captured = capsys.readouterr()
    assert "FAILED b decode seed 0: single-0: 2 of 3 tokens" in captured.err
    assert "9,900" not in captured.out
    assert report_to(bench(), arguments(tmp_path)) == 0


@pytest.mark.slow
def test_json_and_chart_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    report_to(bench(), arguments(tmp_path, json=file, chart=chart))
    printed = capsys.readouterr().out
    assert msgspec.json.decode(file.read_bytes(), type=BenchRun) == bench()
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == printed
    texts = {"".join(element.itertext()).strip() for element in ElementTree.parse(chart).iter()}
    assert {"decode: inter-token latency", "a: 10 ms / 10 ms", "b: 20 ms / 20 ms", "single"} <= texts


@pytest.mark.parametrize(
    ("times", "steady"),
    [([], False), ([1.0], False), ([5.0, 3.0, 1.0], False), ([5.0, 1.1, 1.0], True), ([1.0, 1.0, 2.0], False)],
)
def test_a_server_is_warm_once_it_gets_no_faster(times: list[float], steady: bool) -> None:
    assert is_steady(times) == steady


def test_pooled_benches_keep_all_runs() -> None:
    other = BenchRun(systems=("a", "c"), runs=(run("c", 0, 5.0, 0.03),))
    together = pooled([bench(), other])
    assert together.systems == ("a", "b", "c")
    assert len(together.runs) == 4


def test_requirements_that_break_a_peer_and_those_of_extras_are_left_out() -> None:
    declared = ["regex", "torchvision; python_version > '3'", "TorchAudio>=1", "x>=1; extra == 'bench'", "torch==2", ""]
    assert required_requirements(declared, ("torchvision", "torchaudio")) == ["regex", "torch==2"]


def test_an_unknown_command_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "handoff" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "handoff" in capsys.readouterr().out
