"""Starts and ends `tandem` processes for tests; never looks inside one.

A child must not outlive the tests, however they end, yet code between fork and exec is not safe while gRPC's threads
run in this process. So the child first runs a line of its own that asks for a signal at its parent's death, and then
becomes the program.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tandem.core.ids import Incarnation, WorkerId, WorkerRef

PATIENCE_S = 60.0
"""After this a test has failed, on however slow a machine."""

_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.executable, [sys.executable, "-m", "tandem.cli", *sys.argv[1:]])
"""


def spawn(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """`tandem ARGUMENTS` with its standard error in `log`. It is killed when the thread that called this ends."""
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", _BECOME, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )


class WorkerProcess:
    """One `tandem worker`. `log` holds all that it wrote to standard error."""

    def __init__(self, name: str, arguments: list[str], log_path: Path) -> None:
        self.name = name
        self._log_path = log_path
        self._process = spawn(["worker", "--worker-id", name, *arguments], log_path)
        self._ready: dict[str, Any] | None = None

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def ref(self) -> WorkerRef:
        """Who it says that it is; waits until it serves."""
        if self._ready is None:
            out = self._process.stdout
            assert out is not None
            assert select.select([out], [], [], PATIENCE_S)[0], f"{self.name} says nothing: {self.log}"
            line = out.readline()
            assert line, f"{self.name} ended with {self._process.wait(PATIENCE_S)}: {self.log}"
            self._ready = json.loads(line)
            assert self._ready is not None
        said = self._ready
        return WorkerRef(WorkerId(said["worker"]), Incarnation(said["incarnation"]), said["address"])

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """End it in order; kill it when that takes too long. Returns the exit code."""
        if self.exit_code is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self.wait()

    def complaints(self) -> list[str]:
        """Log lines that a user would worry about."""
        bad = ("WARNING", "ERROR", "CRITICAL", "Traceback", "Exception")
        return [f"{self.name}: {line}" for line in self.log.splitlines() if any(word in line for word in bad)]
