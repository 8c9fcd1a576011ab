"""Test that programs are killed in time with their children, and that missing files read as empty."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from tandem.doctor.system import NOT_FOUND, TIMED_OUT, System, run_program


def test_the_output_of_a_program() -> None:
    code = "import os, sys; print(os.environ['WHO']); sys.stderr.write('no'); sys.exit(3)"
    ran = System(environ={**os.environ}).run([sys.executable, "-c", code], 30, WHO="me")
    assert ran == (3, "me\n", "no")


def test_a_program_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ran = run_program(["sh", "-c", f"sleep 3600 > {pipe} & sleep 3600"], 0.2, {**os.environ})
        assert (ran.code, ran.err) == (TIMED_OUT, "sh did not end within 0.2 s")
        gone = select.poll()
        gone.register(reader, select.POLLHUP)
        assert gone.poll(20_000) == [(reader, select.POLLHUP)], "nobody holds the other end any more"
    finally:
        os.close(reader)


def test_a_missing_program() -> None:
    ran = run_program(["/nowhere/nvidia-smi"], 1, {})
    assert (ran.code, ran.err) == (NOT_FOUND, "/nowhere/nvidia-smi: No such file or directory")


def test_files_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    for name in ("10", "9", "b"):
        (tmp_path / "sys" / name).write_text(f" {name}\n")
    system = System(tmp_path)
    assert (system.text("/sys/10"), system.text("/sys/none")) == ("10", "")
    assert (system.names("/sys"), system.names("/proc")) == (("9", "10", "b"), ())
