"""Test `tandem simulate` and `tandem plan` from the command line to their output files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.cli.simulate_flags import BUILT_IN_MIXES
from tandem.workload.source import built_in_names

COUNT = 20
SMALL = ("--count", str(COUNT), "--rate", "20")


def simulated(tmp_path: Path, *flags: str) -> dict[str, Any]:
    path = tmp_path / "run.json"
    assert main(["simulate", *SMALL, *flags, "--json", str(path)]) == 0
    return dict(json.loads(path.read_text()))


def test_a_run_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--pools", "prefill=1,decode=2", "--tp", "decode=2", "--slo", "ttft=500ms,itl=40ms", "--price", "2")
    document = simulated(tmp_path, *flags)
    output = capsys.readouterr().out
    assert set(document) == {"format", "workload", "deployment", "settings", "slo", "report", "buckets", "series"}
    assert document["deployment"]["num_gpus"] == 5 and document["deployment"]["price_per_hour"] == 10.0
    assert document["settings"]["engine"]["max_num_batched_tokens"] == 2048
    assert document["slo"] == {"ttft_s": 0.5, "itl_s": 0.04}
    report = document["report"]
    assert report["num_requests"] == COUNT and report["errors"] == {}
    assert [pool["pool"] for pool in report["pools"]] == ["decode", "prefill"]
    assert [group["name"] for group in report["groups"]] == ["all", "long", "medium", "short"]
    for words in ("1 prefill + 2 decode of 2 on 5 x h200", "TTFT", "goodput", "fidelity", report["digest"]):
        assert words in output
    assert sum(window["output_rate"] for window in document["series"]["windows"]) > 0
    for group in report["groups"]:
        for measure, buckets in document["buckets"][group["name"]].items():
            assert sum(number for _, number in buckets) == group[measure]["count"] > 0


@pytest.mark.slow
def test_equal_commands_give_equal_runs_and_other_seeds_others(tmp_path: Path) -> None:
    digests = [simulated(tmp_path, "--seed", seed)["report"]["digest"] for seed in ("1", "1", "2")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_settings_reach_the_simulated_workers(tmp_path: Path) -> None:
    usual = simulated(tmp_path)["report"]
    small = simulated(tmp_path, "--max-num-batched-tokens", "256")["report"]
    assert max(g["itl"]["max"] for g in small["groups"]) < max(g["itl"]["max"] for g in usual["groups"])
    blocks = simulated(tmp_path, "--kv-cache-memory", "2GiB", "--max-num-seqs", "4")["report"]
    assert blocks["digest"] != usual["digest"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("zai-org/GLM-4.5-Air", "glm-4.5-air"),
    ],
)
def test_models_and_hardware_may_be_named_as_their_makers_do(tmp_path: Path, name: str, short: str) -> None:
    flags = ("--hardware", "h200", "--tp", "4")
    digest = simulated(tmp_path, "--model", short, *flags)["report"]["digest"]
    assert simulated(tmp_path, "--model", name, "--hardware", "H200", *flags[2:])["report"]["digest"] == digest


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct-FP8", "deepseek-ai/DeepSeek-V3", "Qwen/", "h200"])
def test_a_name_of_another_model_is_refused_as_it_was_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(["simulate", "--model", name], f"--model {name} is not known", capsys)


def test_the_help_names_the_built_in_mixes() -> None:
    assert sorted(BUILT_IN_MIXES) == sorted(built_in_names())


def test_fp8_is_faster_and_is_named_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = simulated(tmp_path)["report"]["groups"][0]["tpot"]["p50"]
    assert simulated(tmp_path, "--weights", "fp8", "--kv", "fp8")["report"]["groups"][0]["tpot"]["p50"] < usual
    assert "llama-3.1-8b (fp8, KV fp8)" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["svg", pytest.param("png", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_a_chart_is_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run.{ending}"
    assert main(["simulate", *SMALL, "--chart", str(path), "--slo", "itl=40ms"]) == 0
    start = path.read_bytes()[:600]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<svg" in start


def test_workers_of_a_lane_serve_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The workload is interactive, so workers for batch requests stay idle."""
    pools = "prefill=1,decode=2:interactive+standard,decode=1:batch"
    document = simulated(tmp_path, "--pools", pools, "--tp", "decode=2")
    assert document["report"]["errors"] == {}
    found = {(pool["pool"], *pool["lanes"]): pool["decode_rate"] for pool in document["report"]["pools"]}
    assert found.keys() == {("decode", "batch"), ("decode", "interactive", "standard"), ("prefill",)}
    assert found["decode", "batch"] == 0 < found["decode", "interactive", "standard"]
    output = capsys.readouterr().out
    assert "1 prefill + 2 decode of 2 for interactive+standard + 1 decode of 2 for batch on 7 x h200" in output
    assert "decode for interactive+standard" in output


REFUSED = [
    (["--model", "llama-3.1-9b"], "did you mean llama-3.1-8b?"),
    (["--hardware", "h300"], "h300 is not known"),
    (["--hardware", "h100,h200"], "h100,h200 names several kinds"),
    (["--tp", "3"], "cannot be cut into 3"),
    (["--model", "llama-3.1-70b", "--hardware", "l40s"], "does not fit into 1 x l40s"),
    (["--hardware", "a100", "--weights", "fp8"], "a100 does not multiply in fp8"),
    (["--pools", "prefill=2"], "prefill workers alone"),
    (["--pools", "decode=2"], "decode workers alone"),
    (["--pools", "mixed=0"], "has no worker"),
    (["--pools", "mixed"], "not POOL=NUMBER"),
    (["--pools", "mixed=1", "--tp", "decode=2"], "--tp names decode"),
    (["--pools", "mixed=1:nightly"], "'nightly' is not a lane"),
    (["--pools", "mixed=1:batch,mixed=2:batch"], "each of prefill, decode, mixed once for the same lanes"),
    (["--pools", "mixed=1", "--tp", "mixed=2:batch"], "not POOL=NUMBER"),
    (["--pools", "prefill=1,decode=1,decode=1:batch", "--autoscale", "planner"], "for all lanes"),
    (["--disaggregation", "strict"], "needs two workers"),
    (["--slo", "ttft=500"], "500' is not a time"),
    (["--slo", "tpot=5ms"], "must be ttft=TIME or itl=TIME"),
    (["--workload", "no-such-mix"], "no-such-mix"),
    (["--count", "0"], "must be at least 1"),
    (["--price", "-1"], "must be 0 or more"),
    (["--link", "0"], "must be more than 0"),
    (["--efficiency", "compute=1.5"], "shares must lie in (0, 1]"),
    (["--efficiency", "speed=1"], "known are memory"),
    (["--json", "no/such/folder/run.json"], "its directory does not exist"),
    (["--json", "/proc/run.json"], "cannot write --json /proc/run.json: No such file or directory"),
    (["--kv-cache-memory", "900GiB"], "must hold one block"),
    (["--max-num-seqs", "4096"], "engine.max_num_batched_tokens"),
    (["--profile", "no-such-profile.json"], "cannot read --profile"),
    (["--tenants", "/nowhere/tenants.yaml"], "--tenants /nowhere/tenants.yaml"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_what_cannot_be_simulated_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(["simulate", *flags], message, capsys)


def check_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *flags = arguments
    assert main([command, "--count", "5", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tandem {command}: ") and message in error
    assert error.count("\n") == 1, "one line, no traceback"


def test_a_full_disk_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(["simulate", "--json", "/dev/full"], "cannot write --json /dev/full: No space left on device", capsys)


def test_a_file_that_is_checked_before_a_run_is_left_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for file in (old, new):
        assert main(["simulate", "--count", "0", "--json", str(file)]) == 2
    assert old.read_text() == "kept" and not new.exists()


def test_a_pipe_is_no_link_to_a_file_that_is_to_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    """As with `--json /dev/stdout | jq`."""
    read, write = os.pipe()
    assert main(["simulate", "--count", "0", "--json", f"/dev/fd/{write}"]) == 2
    os.close(read)
    os.close(write)
    assert "cannot write" not in capsys.readouterr().err


def test_a_link_to_a_file_that_is_to_be_made_is_kept(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    assert main(["simulate", "--count", "0", "--json", str(link)]) == 2
    assert link.is_symlink() and not target.exists()


@pytest.mark.slow
def test_a_chart_of_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The check imports matplotlib, which knows the supported kinds."""
    check_refused(["simulate", "--chart", "run.gif"], "must end in .svg", capsys)


def made_profile(folder: Path) -> str:
    kinds = [{"kind": [0, 0], "factors": [1.0]}]
    cost = {"base_s": 0.02, "prefill_token_s": 1e-3, "decode_seq_s": 1e-3, "decode_context_s": 0, "prefill_pair_s": 0}
    layout = {"block_size": 16, "layers": 30, "heads": 3, "head_dim": 64, "dtype": "float32"}
    settings = {"engine": {"max_num_batched_tokens": 128, "max_num_seqs": 16}}
    worker = {
        "num_blocks": 2000, "num_steps": 9, "layout": layout, "cost": cost, "residuals": kinds, "settings": settings,
    }  # fmt: skip
    profile = {
        "format": "tandem-profile-1", "model": "small", "provenance": "made up", "fidelity": "unknown",
        "latency_s": 1e-3, "delivery_s": [0.0], "bandwidth": 1e9, "workers": {"mixed": worker},
    }  # fmt: skip
    path = folder / "profile.json"
    path.write_text(json.dumps(profile))
    return str(path)


def test_a_profile_brings_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_profile(tmp_path)
    document = simulated(tmp_path, "--profile", path, "--max-num-seqs", "8")
    assert document["settings"]["engine"]["max_num_batched_tokens"] == 128
    assert document["settings"]["engine"]["max_num_seqs"] == 8
    assert "fitted on steps of small: made up" in capsys.readouterr().out
    assert main(["simulate", *SMALL, "--profile", path, "--tp", "2"]) == 2


# ---- plan

FEW = ("--tp", "1", "--budgets", "2048", "--count", "15", "--max-gpus", "2")


@pytest.mark.slow
def test_a_plan_names_the_winner_and_the_other_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    flags = ["--slo", "ttft=500ms,itl=60ms", "--rate", "10", "--percentile", "90", "--json", str(path)]
    assert main(["plan", *FEW, *flags]) == 0
    document, output = json.loads(path.read_text()), capsys.readouterr().out
    assert document["winner"]["kind"] == "mixed" and document["winner"]["num_gpus"] == 1
    assert document["runner_up"]["kind"] == "split" and document["runner_up"]["num_gpus"] == 2
    assert document["winner"]["first"]["holds"] and document["winner"]["is_confirmed"]
    assert "times as long as a long answer" not in output
    assert "Disaggregation does NOT pay here" in output and "1 mixed on 1 x h200" in output and "fidelity" in output


def test_a_plan_for_a_profile_names_it_and_no_other_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_profile(tmp_path)
    few = ("--tp", "1", "--budgets", "128", "--count", "10", "--rate", "0.2", "--max-gpus", "1")
    assert main(["plan", *few, "--slo", "ttft=1000s", "--profile", path]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{path}, 10 requests of mix") and "llama" not in output


def test_a_plan_without_a_feasible_cluster_fails_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *FEW, "--slo", "itl=2ms", "--rate", "10", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["winner"] is None
    assert "Nothing that was tried holds ITL 2 ms" in capsys.readouterr().out


BREAK_EVEN = ("--slo", "ttft=500ms,itl=60ms", "--rate", "10", "--percentile", "90", "--break-even", "link")


@pytest.mark.slow
def test_break_even_points_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *FEW, *BREAK_EVEN, "--json", str(path)]) == 0
    points = json.loads(path.read_text())["break_even"]["link"]
    assert [point["factor"] for point in points[:2]] == [0.25, 1.0] and len(points) >= 3
    assert "the cheaper kind does not change" in capsys.readouterr().out


@pytest.mark.nightly
def test_break_even_points_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = tmp_path / "plan.svg"
    assert main(["plan", *FEW, *BREAK_EVEN, "--chart", str(chart)]) == 0
    assert b"<svg" in chart.read_bytes()[:600]


REFUSED_PLANS = [
    ([], "--slo is missing"),
    (["--slo", "itl=1ms", "--percentile", "100"], "must lie between 0 and 100"),
    (["--slo", "itl=1ms", "--max-gpus", "0"], "must be at least 1"),
    (["--slo", "itl=1ms", "--tp", "1,x"], "--tp 1,x must be a comma-separated list"),
    (["--slo", "itl=1ms", "--break-even", "colour"], "known are prompt, load, link"),
    (["--slo", "itl=1ms", "--hardware", "h100,h200", "--price", "0"], "--price must be more than 0"),
    # What a plan searches.
    (["--slo", "ttft=1s", "--kv-cache-memory", "1GiB"], "cannot be set for a plan"),
    (["--slo", "ttft=1s", "--max-num-batched-tokens", "512"], "cannot be set for a plan"),
    (["--slo", "ttft=1s", "--slo-itl-ms", "9"], "cannot be set for a plan"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED_PLANS)
def test_what_cannot_be_planned_is_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(["plan", *flags], message, capsys)


def test_an_interrupt_ends_a_plan_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.sim.cluster.cluster.SimCluster.run", interrupted)
    assert main(["simulate", *SMALL]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_plan_of_a_short_trace_is_confirmed_by_the_whole_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"2023-11-16 18:17:{n:02}.0000000,400,20" for n in range(15)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    assert main(["plan", "--trace", str(trace), "--count", "10", "--slo", "ttft=5s", "--tp", "1"]) == 0
    assert "1 mixed on 1 x h200" in capsys.readouterr().out


def test_tenants_of_a_gateway_s_file_have_their_quotas(tmp_path: Path) -> None:
    terms = tmp_path / "tenants.yaml"
    terms.write_text("defaults: {requests_per_minute: 3}\ntenants:\n  acme: {keys: []}\n  globex: {keys: []}\n")
    flags = ("--workload", "noisy", "--rate", "30", "--count", "40", "--tenants", str(terms))
    report = simulated(tmp_path, *flags)["report"]
    assert report["errors"] == {"quota_exceeded (requests_per_minute)": 34}
