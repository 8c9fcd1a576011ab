"""The transport contract once more with NIXL over TCP, in a process of its own: UCX reads its settings only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_contract_holds_over_tcp() -> None:
    names = ("test_transports.py", "test_mover_contract.py", "test_heads.py", "test_joined_mover.py")
    suites = [str(Path(__file__).with_name(name)) for name in names]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--confcutdir", str(Path(__file__).parent), "-k", "nixl", *suites),
    ]
    path = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        command, env={**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
