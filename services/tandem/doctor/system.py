"""The machine as checks see it: files below a root, environment variables, programs that are run; never judges them.

Tests give another root and another runner.
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
"""As shells say it."""


class Ran(NamedTuple):
    """What a program said; `code` as of a shell, negative where a signal ended it."""

    code: int
    out: str
    err: str


Runner = Callable[[Sequence[str], float, Mapping[str, str]], Ran]
"""(command, seconds that it may take, its environment) -> what it said; never raises for what the program does."""


def run_program(command: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> Ran:
    """In a session of its own, so that its children end with it."""
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
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    runner: Runner = run_program

    def path(self, name: str) -> Path:
        """Of an absolute name, below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Of a small file, without white space around it; empty where it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, directory: str) -> tuple[str, ...]:
        """In order; none where it cannot be read. Those that are numbers, by number."""
        try:
            found = os.listdir(self.path(directory))
        except OSError:
            return ()
        return tuple(sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)))

    def run(self, command: Sequence[str], limit_s: float, **variables: str) -> Ran:
        """With these variables beside the environment's."""
        return self.runner(command, limit_s, {**self.environ, **variables})
