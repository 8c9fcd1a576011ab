"""Test a program in a session of its own below the process that a user started: signals, exit codes, death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.pids import is_running
from tests.unit.cli.test_gateway_process import wait_for

PROGRAM = """
import os, signal, subprocess, sys
from tandem.cli.process_session import enter_own_session
print("once", flush=False)
code = enter_own_session()
if code is not None:
    sys.exit(code)
part = subprocess.Popen(["sleep", "60"])
numbers = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda received, frame: numbers.append(received))
print(os.getpid(), flush=True)
while not numbers:
    signal.pause()
print(part.poll() is None, *map(int, numbers), flush=True)
part.kill()
part.wait()
{end}
"""


@contextmanager
def started(end: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the program; returns the outer process and the id of the inner one."""
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "once\n"
        try:
            yield outer, int(outer.stdout.readline())
        finally:
            outer.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_reaches_only_the_program_once(number: signal.Signals) -> None:
    with started() as (outer, inner):
        assert os.getpgid(inner) != outer.pid
        os.killpg(outer.pid, number)
        output, _ = outer.communicate(timeout=30)
        assert output.split() == ["True", str(int(number))]
        assert outer.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9)])
def test_the_exit_code_is_that_of_the_program(end: str, code: int) -> None:
    with started(end) as (outer, _):
        outer.terminate()
        assert outer.wait(30) == code


def test_the_program_is_killed_with_the_process_that_the_user_started() -> None:
    with started() as (outer, inner):
        assert is_running(inner)
        outer.kill()
        outer.wait()
        wait_for(lambda: not is_running(inner))
