"""Start the processes of the telemetry benchmark: the two compared sides, and the receiver of their telemetry.

The sides are the same program without and with telemetry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE_S = 60.0
TURNS = (0, 1, 1, 0, 1, 0, 0, 1)
"""Of the two sides in one round: short ones, each side as often first, because a noisy machine changes within seconds.
The second side is looked at once, so in as much time as its turns take together."""
NUM_TURNS = TURNS.count(0)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Child:
    """A program of the benchmark that exchanges JSON lines over stdin and stdout; it ends with the stack."""

    def __init__(self, stack: ExitStack, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name, pipe = " ".join(command), subprocess.PIPE
        self._process = subprocess.Popen(command, env=dict(environment), stdin=pipe, stdout=pipe, text=True)
        stack.callback(self._end)
        self.ready: dict[str, Any] = self._read()

    def request(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def last_words(self) -> dict[str, Any]:
        """Close the program's stdin and return its last line."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._read()

    def cpu_s(self) -> float:
        """Return the processor seconds of all its threads so far, except those that have ended."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} has ended")
        ready: dict[str, Any] = json.loads(line)
        return ready

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class CoreSpeed:
    """Measure the speed of the core on which the sides run; without effect where they may run on any core."""

    def __init__(self, place: ProcessPlacement, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "loadtest.common.core_speed", "--core", str(place.core)]
        self._child = None if place.core < 0 else Child(stack, command, os.environ)
        self._pieces, self._seconds = 0, 0.0

    def lap(self) -> float:
        """Return the mean seconds of one piece of the reference work since the last call; 1 without a core."""
        if self._child is None:
            return 1.0
        reply = self._child.request({})
        if reply["pieces"] == self._pieces:
            raise RuntimeError("the core-speed probe had no time for a single piece of work")
        pieces, seconds = reply["pieces"] - self._pieces, reply["seconds"] - self._seconds
        self._pieces, self._seconds = reply["pieces"], reply["seconds"]
        return float(seconds / pieces)


def get(url: str) -> bytes:
    """Fetch a URL, bypassing any proxy of the environment."""
    with _DIRECT.open(url, timeout=PATIENCE_S) as response:
        body: bytes = response.read()
        return body


class ProcessPlacement(NamedTuple):
    """Where the two sides of the benchmark run.

    `core`: the one core for both; -1: any core. `before`: a checkout of an older commit, which is then the side without
    telemetry; None: both sides are this commit.
    """

    core: int
    before: Path | None

    def command(self, module: str, *arguments: str, is_off: bool = False) -> list[str]:
        core = [] if self.core < 0 else ["--core", str(self.core)]
        if is_off and self.before is not None:
            # The program of this commit, on the packages of the other.
            program = Path(__file__).parents[1] / "telemetry" / f"{module}.py"
            return [sys.executable, "-P", str(program), *arguments, *core]
        return [sys.executable, "-m", f"loadtest.telemetry.{module}", *arguments, *core]

    def environment(self, *, is_off: bool = False) -> dict[str, str]:
        """Return an environment with a fixed hash seed, so that two processes order their dictionaries alike."""
        chosen = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        chosen["PYTHONHASHSEED"] = "0"
        if is_off and self.before is not None:
            chosen["PYTHONPATH"] = os.pathsep.join(str(self.before / part) for part in ("services", "kernels", ""))
        return chosen


def sink(stack: ExitStack) -> Child:
    """Start the receiver of pushed telemetry."""
    return Child(stack, [sys.executable, "-m", "loadtest.processes.otlp_sink"], os.environ)


def pushing(endpoint: str, ratio: float = 1.0) -> dict[str, str]:
    """Return OpenTelemetry's environment variables for exports to `endpoint`; `ratio`: the share of traces that are
    sampled."""
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(ratio),
    }
