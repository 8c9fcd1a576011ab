"""Run one `tandem serve` as a user starts it, and track the processes that belong to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx

START_S = 180.0
END_S = 90.0
POLL_S = 0.1

_T = TypeVar("_T")
_Process = tuple[int, str]
"""Process id and start time, which together identify a process for ever."""


class Served:
    """Own a `tandem serve`. `output` is all that it has written, `seen` every process that was ever found below it."""

    def __init__(self, *flags: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem.cli", "serve", "--num-threads", "1", *flags],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.seen: set[_Process] = set()
        self.url = ""

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill every process that is left, whatever the test did."""
        self.look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end(self.left())
        self._reader.join(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_ready(self) -> Served:
        self.wait_output(r"Ctrl-C drains and stops.*\n")
        self.url = re.findall(r"Tandem serves \S+ at (http://\S+)", self.output)[0]
        self.look()
        return self

    def wait_output(self, pattern: str) -> None:
        """Wait until the output matches the pattern."""
        until(lambda: re.search(pattern, self.output) or self.process.poll() is not None, START_S, lambda: self.output)
        assert re.search(pattern, self.output), self.output

    def wait_end(self) -> int:
        code = self.process.wait(END_S)
        self._reader.join(END_S)
        return code

    # ---- its processes

    def look(self) -> dict[_Process, str]:
        """Return all processes below it now, with their command lines."""
        found = dict(below(self.process.pid))
        self.seen |= found.keys()
        return found

    def replica(self, pool: str) -> int | None:
        """Return the process of the only worker of a pool."""
        found = self.look().items()
        return next((pid for (pid, _), line in found if line.startswith("ray::") and f"tandem-{pool}" in line), None)

    def left(self) -> set[_Process]:
        """Return the seen processes that still live."""
        return {one for one in self.seen if _lives(one)}

    def wait_nothing_left(self, *but: str) -> None:
        """Wait until no process is left; `but` names processes that may take longer."""

        def lines() -> list[str]:
            found = [_command_line(pid).strip() for pid, _ in self.left()]
            return [line for line in found if line not in but]

        until(lambda: not lines(), END_S, lambda: str(lines()))

    # ---- as a client

    def chat(self, content: str, **options: object) -> httpx.Response:
        body = {"model": "smollm2-135m-instruct", "temperature": 0, "messages": [{"role": "user", "content": content}]}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body | options, timeout=END_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)


def until(condition: Callable[[], _T], patience_s: float, report: Callable[[], str] = lambda: "") -> _T:
    """Return the first true value of a condition; fail at the timeout."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited for {patience_s:g} s in vain: {report()}"
        time.sleep(POLL_S)
    return value


def end(processes: Iterable[_Process]) -> None:
    """Kill those of the processes that still live, at once."""
    for pid, start in processes:
        if _lives((pid, start)):
            os.kill(pid, signal.SIGKILL)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it at once."""
    tree = [one for one, _ in below(process.pid)]
    process.kill()
    process.wait()
    end(tree)


def cpu_ticks(pid: int) -> int:
    """Return the processor time that a process has used, in clock ticks."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _lives(process: _Process) -> bool:
    pid, start = process
    return _start_time(pid) == start


def below(root: int) -> Iterator[tuple[_Process, str]]:
    """Return the tree under a process, itself included."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    tree = {root}
    while grown := {pid for pid, stat in parents.items() if stat and int(stat[1]) in tree} - tree:
        tree |= grown
    for pid in tree:
        start = _start_time(pid)
        if start is not None:
            yield (pid, start), _command_line(pid)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str | None:
    """None also for a process that has ended and only waits to be noticed by its parent."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
