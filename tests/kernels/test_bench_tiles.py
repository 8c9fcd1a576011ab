"""The search for tiles: what is wrong, does not fit or is far too slow is said so, and the tables stay as they are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem_kernels.bench import autotune
from tandem_kernels.bench.autotune import SIZES, TileSearch, build_search, main, run_search, to_markdown
from tandem_kernels.bench.case import Bench, BenchCase, BenchWork
from tandem_kernels.bench.grid import FULL, LLAMA_1B, LLAMA_8B, TINY
from tandem_kernels.bench.timing import Call, KernelTiming
from tandem_kernels.dispatch import REFERENCE
from tandem_kernels.triton import decode_attention

KEY = 128, 2
BEFORE = dict(decode_attention.TILES)


class Stopwatch:
    """A launch takes `costs` of the tiles in the table, and each reading of the clock a second."""

    def __init__(self, costs: Callable[[decode_attention.DecodeTiles], float]) -> None:
        self.costs, self.seconds = costs, 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def time(self, call: Call, *, waits: bool = False) -> KernelTiming:
        call()
        return KernelTiming.of([self.costs(decode_attention.TILES[KEY])], "host")

    def launch(self, call: Call, count: int) -> tuple[float, float]:
        raise NotImplementedError


def _race(
    run: Callable[[decode_attention.DecodeTiles], torch.Tensor],
    costs: Callable[[decode_attention.DecodeTiles], float] = lambda _: 1.0,
    ends_at: float = 1e9,
) -> TileSearch:
    """Of two works that do the same."""

    def build(_: Bench) -> BenchWork:
        return BenchWork(run=lambda: run(decode_attention.TILES[KEY]), num_bytes=1)

    grid = replace(FULL, shapes=(LLAMA_8B,))
    contest = replace(
        build_search("decode", grid, SIZES["decode"]), cases=[BenchCase("decode", name, build) for name in "ab"]
    )
    run_search(contest, Bench(torch.device("cpu"), REFERENCE, Stopwatch(costs), TINY, 0), ends_at, lambda _: None)
    assert decode_attention.TILES == BEFORE
    return contest


def test_every_choice_is_tried_once_the_tables_first() -> None:
    contest = build_search("decode", replace(FULL, shapes=(LLAMA_8B,)), SIZES["decode"])
    found = [entry.tiles for entry in contest.entries]
    assert contest.own.tiles == decode_attention.TILES[KEY] and len(set(found)) == len(found) == 3 * 2 * 3 * 4
    assert all(entry.tiles._asdict()["slice_tokens"] % entry.tiles.block_n == 0 for entry in contest.entries)
    assert build_search("chunk", replace(FULL, shapes=(LLAMA_1B,)), SIZES["chunk"]).key == (64, 2)


def test_the_fastest_is_first_and_the_hopeless_run_no_second_work() -> None:
    contest = _race(lambda _: torch.ones(3), lambda tiles: 1.0 if tiles == BEFORE[KEY] else 0.5 + tiles.warps / 8)
    table = to_markdown(contest).splitlines()
    assert "warps 2" in table[2] and "| 0.750 |" in table[2]
    assert "(the table's)" in table[2 + 6] and "| 1.000 |" in table[2 + 6]
    slow = [entry for entry in contest.entries if entry.left == "slower"]
    assert slow and all(entry.tiles.warps > 2 and list(entry.seconds) == ["a"] for entry in slow)
    assert contest.is_right


def test_a_wrong_result_is_an_error_and_one_that_does_not_fit_is_none() -> None:
    def run(tiles: decode_attention.DecodeTiles) -> torch.Tensor:
        if tiles.stages == 9:
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        return torch.full((3,), 1.1 if tiles.block_n == 32 and tiles.warps == 2 else 1.0)

    contest = _race(run)
    assert not contest.is_right
    assert {entry.tiles.block_n for entry in contest.entries if entry.is_wrong} == {32}
    refused = [entry for entry in contest.entries if "out of resource" in entry.left]
    assert {entry.tiles._asdict()["stages"] for entry in refused} == {9}
    assert "18: RuntimeError: out of resource: shared memory" in to_markdown(contest)


def test_the_tables_tiles_must_run() -> None:
    def run(tiles: decode_attention.DecodeTiles) -> torch.Tensor:
        if tiles == BEFORE[KEY]:
            raise RuntimeError("no")
        return torch.ones(1)

    contest = _race(run)
    assert not contest.is_right and "(the table's)" in to_markdown(contest)


def test_time_that_runs_out_leaves_others_untried() -> None:
    contest = _race(lambda _: torch.ones(1), ends_at=20.0)
    left = [entry.left for entry in contest.entries]
    assert left[0] == "" and left.count("no time left") > 40 and contest.is_right


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here, for the GPU")
def test_it_runs_at_toy_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreted kernel takes as long as the machine lets it.
    monkeypatch.setattr(autotune, "_SLOW_FACTOR", math.inf)
    assert main(["--device", "cpu", "--tiny", "--kernels", "decode", "--json", str(tmp_path / "a.json")]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    (contest,) = report["contests"]
    assert [entry["left"] for entry in contest["entries"]] == ["", ""] and contest["key"] == [64, 2]
    assert all(seconds > 0 for entry in contest["entries"] for seconds in entry["seconds"].values())
    assert "2 of 2 ran all works" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"), [(["--device", "cpu"], "TRITON_INTERPRET=1"), (["--kernels", "digest"], "only decode, chunk")]
)
def test_what_it_cannot_do_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        autotune.main(args)
    assert caught.value.code == 2 and message in capsys.readouterr().err
