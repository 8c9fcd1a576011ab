"""Access to this machine for checks: files, environment variables and programs.

Tests replace the root of the file system and the function that runs programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

NOT_FOUND, TIMED_OUT = 127, 124
"""Exit codes, as those of a shell and of `timeout`."""


class Ran(NamedTuple):
    """Hold the result of a program that was run.

    `code`: exit code, negative if a signal ended the program, `NOT_FOUND` if it could not be started, `TIMED_OUT` if it
    was killed at the time limit. `out`, `err`: standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def problem(self) -> str:
        """Return why the program failed: that it is not installed; otherwise the last line that it wrote, or its exit
        code if it wrote nothing."""
        if self.code == NOT_FOUND:
            return f"{self.err.partition(':')[0]} is not installed"
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


Runner = Callable[[Sequence[str], float, Mapping[str, str]], Ran]
"""Signature of a runner: `runner(command, limit_s, environ)` runs a program for at most `limit_s` seconds and returns
its result. It does not raise if the program fails."""


def run_program(command: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> Ran:
    """Run a program until it ends or `limit_s` seconds have passed, and return its result. `environ`: environment
    variables of the program.

    It runs in a session of its own, so that its children are killed with it at the time limit. Does not raise if the
    program cannot be started."""
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Ran(NOT_FOUND, "", f"{command[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Ran(TIMED_OUT, "", f"{command[0]} did not end within {limit_s:g} s")
    return Ran(process.returncode, out, err)


@dataclass(frozen=True, slots=True)
class System:
    """Give checks access to this machine; tests replace the parts.

    `root`: directory in which absolute paths are looked up. `environ`: environment variables. `runner`: runs programs.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    runner: Runner = run_program

    def path(self, name: str) -> Path:
        """Return the path below `root` of the file with the absolute path `name`, such as /proc/cpuinfo."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return the text of a small file without surrounding blanks; empty if it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the names in a directory, sorted, with numbers first in numeric order; empty if it cannot be read."""
        try:
            found = os.listdir(self.path(directory))
        except OSError:
            return ()
        return tuple(sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)))

    def run(self, command: Sequence[str], limit_s: float, **variables: str) -> Ran:
        """Run a program with `variables` added to the environment, and return its result.

        `limit_s`: seconds after which the program is killed. Does not raise if the program fails."""
        return self.runner(command, limit_s, {**self.environ, **variables})
