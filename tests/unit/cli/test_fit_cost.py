"""Test `tandem fit-cost` from step logs to a profile that `tandem simulate` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.engine.step_log import encode_head, encode_step
from tests.simulation.test_fit import exact, log_of, sampled_steps


def write_log(directory: Path, count: int) -> None:
    log = log_of(exact(sampled_steps(count)))
    lines = [encode_head(log.head), *(encode_step(step) for step in log.steps)]
    (directory / "w.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_log_becomes_a_profile_that_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, 400)
    profile = tmp_path / "profile.json"
    assert main(["fit-cost", str(tmp_path), "--output", str(profile), "--note", "a desk", "--latency-ms", "3"]) == 0
    output = capsys.readouterr().out
    assert "mixed: 380 steps" in output and "predicts 100.0% of all time" in output
    assert json.loads(profile.read_text())["latency_s"] == 0.003
    assert main(["simulate", "--profile", str(profile), "--count", "20", "--rate", "0.5"]) == 0
    output = capsys.readouterr().out
    assert "a desk" in output and "unknown: no other run was predicted with it yet" in output


def test_bad_logs_are_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, 50)
    profile = tmp_path / "profile.json"
    assert main(["fit-cost", str(tmp_path), "--output", str(profile)]) == 2
    assert "too few to fit on" in capsys.readouterr().err
    assert main(["fit-cost", str(tmp_path / "nothing"), "--output", str(profile)]) == 2
    assert not profile.exists()


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        *(("--latency-ms", value, "must be 0 or more") for value in ("-50", "nan", "inf")),
        *(("--bandwidth", value, "must be more than 0") for value in ("0", "-1", "nan", "inf")),
    ],
)
def test_numbers_that_no_cluster_has_are_refused(
    tmp_path: Path, flag: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, 400)
    profile = tmp_path / "profile.json"
    assert main(["fit-cost", str(tmp_path), "--output", str(profile), f"{flag}={value}"]) == 2
    assert f"tandem fit-cost: {flag} {value} {rule}" in capsys.readouterr().err and not profile.exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, 400)
    assert main(["fit-cost", str(tmp_path), "--output", str(tmp_path / "none" / "p.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_pools_with_settings_of_their_own_are_not_simulated_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, 400)
    profile = tmp_path / "profile.json"
    assert main(["fit-cost", str(tmp_path), "--output", str(profile)]) == 0
    document = json.loads(profile.read_text())
    other = json.loads(json.dumps(document["workers"]["mixed"]))
    document["workers"]["decode"] = other
    for name, value, status in (("num_threads", 7, 0), ("max_num_seqs", 7, 2)):
        other["settings"]["engine"][name] = value
        profile.write_text(json.dumps(document))
        assert main(["simulate", "--profile", str(profile), "--count", "5", "--rate", "0.5"]) == status
    assert "ran with different settings" in capsys.readouterr().err
