"""`tandem planner` where something was said wrongly or is away; with a cluster tests/e2e tries it."""

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
    ("arguments", "said"),
    [
        (("planner",), "say where with --redis-url"),
        ((*HERE, "--actuator", "raycluster"), "--planner-rayservice"),
        ((*HERE, "--actuator", "raycluster", "--rayservice", "a", "--raycluster", "b"), "--planner-rayservice"),
        ((*HERE, "--actuator", "raycluster", "--rayservice", "a"), "--planner-groups"),
        ((*HERE, "--groups", "fast"), "planner.groups"),
        ((*HERE, "--max-decode", "2", "--min-decode", "3"), "planner.max_decode"),
        ((*HERE, "--planner-lease-s", "1"), "planner.lease_s"),
    ],
)
def test_what_was_said_wrongly_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_kubeconfig_it_says_so(tmp_path: Path) -> None:
    arguments = (*HERE, "--actuator", "raycluster", "--rayservice", "a", "--groups", "prefill=a,decode=b", "--once")
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    environment |= {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "neither in a cluster nor with a kubeconfig" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_redis_that_is_away_holds_and_is_told(tmp_path: Path) -> None:
    """In a process of its own, whose logging it sets up."""
    arguments = ("planner", "--redis-url", f"unix://{tmp_path}/none.sock", "--once", "--json")
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    told = json.loads(done.stdout)
    assert (done.returncode, told["outcome"]) == (0, "held_back"), done.stderr
    assert "workers and demand cannot be read from Redis" in told["reasons"][0]
