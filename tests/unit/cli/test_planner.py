"""Test `tandem planner` with wrong settings and without its dependencies; tests/e2e covers it with a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import main

HERE = ("planner", "--redis-url", "unix:///nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("planner",), "set --redis-url"),
        ((*HERE, "--actuator", "raycluster"), "--rayservice"),
        ((*HERE, "--actuator", "raycluster", "--rayservice", "a", "--raycluster", "b"), "--rayservice"),
        ((*HERE, "--actuator", "raycluster", "--rayservice", "a"), "--groups"),
        ((*HERE, "--groups", "fast"), "planner.groups"),
        ((*HERE, "--max-decode", "2", "--min-decode", "3"), "planner.max_decode"),
        ((*HERE, "--planner-lease-s", "1"), "planner.lease_s"),
        ((*HERE, "--planner-lease", "Not_A_Name"), "planner.lease "),
    ],
)
def test_wrong_settings_are_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_kubeconfig_is_reported(tmp_path: Path) -> None:
    arguments = (*HERE, "--actuator", "raycluster", "--rayservice", "a", "--groups", "prefill=a,decode=b", "--once")
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    environment |= {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "neither a kubeconfig" in done.stderr, done.stderr


@pytest.mark.slow
def test_an_absent_redis_holds_the_decision_and_is_reported(tmp_path: Path) -> None:
    """Run the command in a separate process, since it sets up the process's logging."""
    arguments = ("planner", "--redis-url", f"unix://{tmp_path}/none.sock", "--once", "--json")
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    decision = json.loads(done.stdout)
    assert (done.returncode, decision["outcome"]) == (0, "held_back"), done.stderr
    assert "workers and demand cannot be read from Redis" in decision["reasons"][0]
