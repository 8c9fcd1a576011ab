"""The transport contract once more with NIXL over TCP, in a process of its own: UCX reads its settings only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = ("test_transports.py", "test_transfer_thread.py", "test_heads.py", "test_multi_rank_transfer.py")
UNLIKE = (
    "test_transports.py::test_any_blocks_arrive_anywhere_and_nothing_else_changes[nixl]",
    "test_transports.py::test_a_peer_that_dies_during_a_read[nixl]",
    "test_transports.py::test_a_stopped_peer_hangs_nobody_and_its_next_life_is_read[nixl]",
    "test_transports.py::test_a_teardown_is_unproven_while_a_stopped_peer_may_still_answer[nixl]",
    "test_transports.py::test_nothing_writes_after_close[nixl]",
    "test_transfer_thread.py::test_a_stopped_peer_is_torn_down_and_its_next_life_is_read[nixl]",
    "test_heads.py::test_a_rank_that_dies_during_a_read_leaves_no_uncertain_read[nixl-float32]",
)
"""Over TCP a read needs its target as long as it goes on: these end otherwise than those of shared memory."""


def test_what_needs_its_target_holds_over_tcp() -> None:
    run_over_tcp(*UNLIKE)


@pytest.mark.nightly
def test_the_whole_contract_holds_over_tcp() -> None:
    run_over_tcp(*SUITES, "-k", "nixl")


def run_over_tcp(*arguments: str) -> None:
    """Run tests of this folder, named by their files, and those among them that only `make nightly` runs."""
    here = Path(__file__).parent
    named = [str(here / argument) if argument.startswith("test_") else argument for argument in arguments]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(here), *named]
    path = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        command, env={**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
