"""Start and stop `tandem` processes for tests.

A child must not outlive the tests, however they end, yet code between fork and exec is not safe while gRPC's threads
run in this process. So the child first runs a line of its own that requests a signal at its parent's death, and then
becomes the program.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.core.ids import Incarnation, WorkerId, WorkerRef

PATIENCE_S = 60.0
"""Timeout in seconds after which a test has failed, even on a slow machine."""

_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def spawn(*command: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process without input. It is killed when the calling thread ends."""
    become = [sys.executable, "-I", "-S", "-c", _BECOME]
    return subprocess.Popen([*become, *command], stdin=subprocess.DEVNULL, **streams)


class Program:
    """Own one `tandem` process; `log` holds its standard error, and `ready` the line that it printed when it began to
    serve. `within` is the command that starts it, for example in another network. `expected`: texts of log lines that
    a test causes on purpose.
    """

    def __init__(self, directory: Path, name: str, *arguments: str, within: Sequence[str] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.within = within
        number = len(list(directory.glob(f"{name}-*.log")))
        self.log_path = directory / f"{name}-{number}.log"
        command = (*within, sys.executable, "-m", "tandem.cli", *arguments)
        with self.log_path.open("wb") as log:
            self._process = spawn(*command, stdout=subprocess.PIPE, stderr=log)
        self.ready: dict[str, Any] = {}
        self.expected: list[str] = []

    def wait_ready(self) -> None:
        """Read the line with the address on which the process listens, unless it was read before."""
        if self.ready:
            return
        out = self._process.stdout
        assert out is not None
        assert select.select([out], [], [], PATIENCE_S)[0], f"{self.name} says nothing: {self.log}"
        line = out.readline()
        assert line, f"{self.name} ended with {self.wait()}: {self.log}"
        self.ready = json.loads(line)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

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
        """Stop the process in order, or kill it when that takes too long. Return the exit code."""
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
        """Return the log lines that would worry a user; lines with an expected text are left out."""
        bad = ("WARNING", "ERROR", "CRITICAL", "Traceback", "Exception")
        lines = (line for line in self.log.splitlines() if not any(text in line for text in self.expected))
        return [f"{self.name}: {line}" for line in lines if any(word in line for word in bad)]


class WorkerProcess(Program):
    """Own one `tandem worker`."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        super().__init__(directory, name, "worker", "--worker-id", name, *arguments)

    @property
    def ref(self) -> WorkerRef:
        """Return the identity that the worker reports; wait until it serves."""
        self.wait_ready()
        ready = self.ready
        return WorkerRef(WorkerId(ready["worker"]), Incarnation(ready["incarnation"]), ready["address"])
