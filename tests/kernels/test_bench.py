"""The bench of the kernels at toy sizes: it measures all that it promises, and a kernel that is wrong is found."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem_kernels.bench.__main__ import main
from tandem_kernels.bench.attention import attention_cases, layout_cases
from tandem_kernels.bench.case import Bench, BenchCase, BenchRow, BenchWork, CaseUnavailable, share_of
from tandem_kernels.bench.checks import checks, run_check
from tandem_kernels.bench.grid import FULL, LLAMA_8B, TINY
from tandem_kernels.bench.pools import batch_over, block_pool, layer_pool, layers_within
from tandem_kernels.bench.report import best_block_size, layout_loss
from tandem_kernels.bench.roofline import DeviceLimits, measure_limits
from tandem_kernels.bench.rows import block_cases, row_cases, sampling_cases
from tandem_kernels.bench.runner import RunOutcome, run_cases, run_checks
from tandem_kernels.bench.timing import HostStopwatch, KernelTiming
from tandem_kernels.contract import FLOAT8, LayerKV
from tandem_kernels.dispatch import REFERENCE
from tandem_kernels.reference import paged_attention

CPU = torch.device("cpu")
MESSAGES: list[str] = []
TINY_ARGS = ["--device", "cpu", "--tiny"]
GROUPS = {
    "decode", "chunk", "layout", "uneven", "mixed", "block size", "number format", "sampling", "pack", "unpack",
    "digest", "rope and cache write", "add and rms-norm", "silu-mul", "rms-norm", "linear", "experts",
    "linear in few bits", "experts in few bits",
}  # fmt: skip


def _bench(**kernels: Any) -> Bench:
    return Bench(CPU, replace(REFERENCE, **kernels), HostStopwatch(0.0), TINY, 1 << 30)


def _limits() -> DeviceLimits:
    return measure_limits(CPU, torch.bfloat16, HostStopwatch(0.0), TINY)


def _timing(seconds: float) -> KernelTiming:
    return KernelTiming(seconds, seconds, seconds, 1, "host")


def _row(group: str, name: str, seconds: float) -> BenchRow:
    return BenchRow(group, name, _timing(seconds), 1, 0, 1.0, {})


def test_one_call_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY_ARGS, "--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert {row["group"] for row in report["rows"]} == GROUPS
    assert not report["failed"] and not report["left_out"]
    assert len(report["checks"]) == len(list(checks(TINY))) and all(check["is_right"] for check in report["checks"])
    assert all(
        row["timing"]["median_s"] > 0 and row["timing"]["runs"] > 1 and row["share"] > 0 for row in report["rows"]
    )
    assert report["limits"]["copy_bytes_s"] > 0 and report["limits"]["matrix_flops_s"] > 0
    assert report["block_size"] in TINY.block_sizes
    fresh, cached = (row for row in report["rows"] if row["group"] == "chunk")
    assert set(fresh["rivals"]) == {"SDPA", "SDPA and its gather"} and set(cached["rivals"]) == {"SDPA"}
    assert report["machine"]["command"].endswith(
        "--device cpu --tiny --json " + " ".join([str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")])
    )
    markdown = capsys.readouterr().out
    assert markdown == (tmp_path / "a.md").read_text()
    assert all(f"### {group}\n" in markdown for group in GROUPS)


def test_only_the_requested_groups_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY_ARGS, "--only", "digest,layout"]) == 0
    output = capsys.readouterr().out
    assert (
        "### digest" in output and "### layout" in output and "### decode" not in output and "0 of 0 checks" in output
    )
    with pytest.raises(SystemExit):
        main([*TINY_ARGS, "--only", "digests"])
    assert "no group is named like digests" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--quick"])
    assert "toy sizes only" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("tandem_kernels.triton") is None, reason="there are no kernels in Triton")
@pytest.mark.parametrize("kernels", ["triton", "batch-invariant"])
def test_triton_s_kernels_are_what_the_bench_takes_them_for(kernels: str) -> None:
    """Interpreted, in a process of their own: the variable is read when Triton is imported."""
    command = [sys.executable, "-m", "tandem_kernels.bench", *TINY_ARGS, "--kernels", kernels]
    only = ["--only", "checks,decode,chunk,layout,uneven,mixed,number,linear"]
    done = subprocess.run([*command, *only], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "- kernels: triton" in done.stdout and "### layout" in done.stdout


@pytest.mark.parametrize(
    "kernel",
    [
        "linear", "rms_norm", "add_rms_norm", "silu_mul", "rope_cache_write", "paged_attention", "pack_blocks",
        "unpack_blocks", "block_digest", "sample",
    ],
)  # fmt: skip
def test_a_kernel_that_is_a_little_wrong_is_found(kernel: str) -> None:
    """Off by two percent, or by one where it must be exact."""
    right = getattr(REFERENCE, kernel)

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        if kernel == "unpack_blocks":
            arguments[1][3, 0].add_(1)
            return result
        if isinstance(result, tuple):
            return result[0] * 1.02, result[1]
        return result * 1.02 if result.dtype.is_floating_point and kernel != "pack_blocks" else result + 1

    outcome = RunOutcome()
    run_checks(_bench(**{kernel: wrong}), checks(TINY), float("inf"), outcome, MESSAGES.append)
    assert not outcome.is_right
    assert any(not verdict.is_right and verdict.error > verdict.tolerance for verdict in outcome.checks)


def test_results_that_change_between_runs_are_found() -> None:
    def racing(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        return REFERENCE.sample(logits, rows) + torch.randint(1 << 20, (len(logits),))

    (check,) = (check for check in checks(TINY) if check.name.startswith("sampling"))
    assert "differ" in run_check(check, _bench(sample=racing)).failure


def _to_a_slot(kv: LayerKV, query: torch.Tensor) -> None:
    kv.key[-1, -1, -1] += 1


def _to_another_layer(kv: LayerKV, query: torch.Tensor) -> None:
    kv.key.as_strided((1,), (1,), 0).add_(1)


def _no_number(kv: LayerKV, query: torch.Tensor) -> None:
    query[0] = torch.nan


@pytest.mark.parametrize("wrong", [_to_a_slot, _to_another_layer, _no_number])
def test_a_stray_write_and_a_number_that_is_none_are_found(wrong: Callable[[LayerKV, torch.Tensor], None]) -> None:
    def write(*arguments: Any) -> torch.Tensor:
        query = REFERENCE.rope_cache_write(*arguments)
        wrong(arguments[4], query)
        return query

    outcome = RunOutcome()
    run_checks(_bench(rope_cache_write=write), checks(TINY), float("inf"), outcome, MESSAGES.append)
    verdicts = {verdict.name: verdict.is_right for verdict in outcome.checks}
    assert all(is_right != name.startswith("rope") for name, is_right in verdicts.items())


def test_timed_work_is_compared_with_what_torch_yields() -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        return paged_attention(*arguments) * 1.02

    outcome = RunOutcome()
    cases = [case for case in attention_cases(TINY) if case.group in ("decode", "chunk")]
    run_cases(_bench(paged_attention=wrong), _limits(), cases, float("inf"), outcome, MESSAGES.append)
    assert len(outcome.failed) == len(cases) and all("away from SDPA" in why for why in outcome.failed.values())


def test_a_rival_that_cannot_run_is_left_out_and_the_kernel_is_not() -> None:
    def raises() -> torch.Tensor:
        raise torch.OutOfMemoryError("too large")

    def build(bench: Bench) -> BenchWork:
        return BenchWork(run=lambda: torch.ones(3), num_bytes=12, agreeing={"theirs": raises}, rivals={"other": list})

    outcome = RunOutcome()
    run_cases(_bench(), _limits(), [BenchCase("a", "one", build)], float("inf"), outcome, MESSAGES.append)
    assert [set(row.rivals) for row in outcome.rows] == [{"other"}] and outcome.is_right
    assert outcome.left_out == {"a: one, theirs": "OutOfMemoryError: too large"}


def test_a_case_that_fails_does_not_stop_the_next_and_time_ends_all() -> None:
    def fails(bench: Bench) -> BenchWork:
        raise RuntimeError("broken")

    def too_large(bench: Bench) -> BenchWork:
        raise CaseUnavailable("too large")

    good = next(block_cases(TINY))
    cases = [BenchCase("a", "fails", fails), BenchCase("a", "large", too_large), good]
    outcome = RunOutcome()
    run_cases(_bench(), _limits(), cases, float("inf"), outcome, MESSAGES.append)
    assert outcome.failed == {"a: fails": "RuntimeError: broken"} and outcome.left_out == {"a: large": "too large"}
    assert [row.group for row in outcome.rows] == ["pack"] and not outcome.is_right
    late = RunOutcome()
    run_cases(_bench(), _limits(), cases, -1.0, late, MESSAGES.append)
    run_checks(_bench(), checks(TINY), -1.0, late, MESSAGES.append)
    assert not late.rows and len(late.left_out) == len(cases) + len(list(checks(TINY)))


def test_both_layouts_hold_the_same_kv() -> None:
    bench = _bench()
    shape, contexts = TINY.shapes[0], [40, 17]
    blocks, layers = (make(bench, shape, torch.float32, 16, 6, 2) for make in (block_pool, layer_pool))
    assert blocks.memory.shape[0] == 6 and layers.memory.shape[:2] == (2, 2)
    for ours, theirs in zip(blocks.layers, layers.layers, strict=True):
        theirs.key.copy_(ours.key)
        theirs.value.copy_(ours.value)
    batch = batch_over(bench, [1, 5], contexts, 16, 6)
    assert batch.num_decodes == 1 and batch.max_rows == 5 and batch.query_starts.tolist() == [0, 1, 6]
    used = batch.block_tables[0].tolist() + batch.block_tables[1, :2].tolist()
    assert len(set(used)) == len(used) == 5
    query = torch.randn(6, shape.heads, shape.head_dim)
    assert torch.equal(*(paged_attention(query, pool.layer, batch, 0.2) for pool in (blocks, layers)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FLOAT8])
def test_pools_are_finite_and_no_two_numbers_of_a_tile_agree_by_design(dtype: torch.dtype) -> None:
    kv = block_pool(_bench(), TINY.shapes[0], dtype, 16, 3, 2).layer
    keys = kv.key.float()
    assert bool(keys.isfinite().all()) and len(keys[0, 0, 0].unique()) > 8
    assert (kv.key_scale is not None) == (dtype == FLOAT8)


def test_a_pool_has_as_many_layers_as_fit() -> None:
    token = 8 * 2 * 128 * 2
    assert layers_within(LLAMA_8B, torch.bfloat16, 1024, 1024 * token * 100) == 32
    assert layers_within(LLAMA_8B, torch.bfloat16, 1024, 1024 * token * 3 + 5) == 3
    with pytest.raises(CaseUnavailable, match="4 MiB"):
        layers_within(LLAMA_8B, torch.bfloat16, 1024, 1024 * token - 1)


def test_the_full_grid_has_the_required_cases() -> None:
    """Of the model that is served most; 256 x 32K may not fit and then says so."""
    names = [f"{case.group}: {case.name}" for case in (*attention_cases(FULL), *layout_cases(FULL))]
    for batch in (1, 8, 32, 128, 256):
        for context in (1024, 8192, 32768):
            assert f"decode: 32/8 heads of 128 bfloat16 {batch} x {context}" in names
    assert all(f"chunk: 32/8 heads of 64 bfloat16 {n} rows on 8192 cached" in names for n in (512, 2048, 8192))
    assert sum(name.startswith("layout") for name in names) == 2 * 2 * 4
    others = [*row_cases(FULL), *block_cases(FULL), *sampling_cases(FULL)]
    assert len({(case.group, case.name) for case in others}) == len(others)


def test_a_share_is_of_the_nearer_limit() -> None:
    limits = replace(_limits(), copy_bytes_s=100.0, matrix_flops_s=1000.0)
    assert share_of(BenchWork(run=list, num_bytes=50, flops=100), 1.0, limits) == 0.5
    assert share_of(BenchWork(run=list, num_bytes=50, flops=900), 1.0, limits) == 0.9


def test_the_block_size_is_the_smallest_among_the_fastest() -> None:
    times = {16: (1.2, 1.0), 32: (1.01, 1.0), 64: (1.0, 1.0), 128: (1.0, 1.3)}
    rows = [
        _row("block size", f"a bfloat16 blocks of {size} {what}", seconds)
        for size, both in times.items()
        for what, seconds in zip(("3 x 40", "8 rows"), both, strict=True)
    ]
    assert best_block_size(rows) == 32
    assert best_block_size(rows[:3]) == 16, "32 was not measured in both"
    assert best_block_size([]) == 0


def test_a_layout_s_loss_is_by_case() -> None:
    rows = [
        _row("layout", "x 3 x 40, blocks contiguous", 1.1),
        _row("layout", "x 3 x 40, layers outermost", 1.0),
        _row("layout", "y 3 x 40, blocks contiguous", 1.0),
    ]
    assert layout_loss(rows) == {"x 3 x 40": pytest.approx(0.1)}


def test_a_timing_has_median_and_spread() -> None:
    timing = KernelTiming.of([float(i) for i in range(11, 0, -1)], "host")
    assert (timing.low_s, timing.median_s, timing.high_s, timing.runs) == (2.0, 6.0, 10.0, 11)
