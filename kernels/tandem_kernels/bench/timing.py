"""Measure how long a call takes, on a GPU or on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

_MIN_RUNS, _MAX_RUNS = 10, 200
_FLUSHED_CACHES = 4
"""Size of the flush buffer, in sizes of the L2 cache."""


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Time of one call in seconds.

    `median_s`: median of `runs` runs. `low_s`, `high_s`: first and ninth decile. `mode`: `graph` (replayed on a GPU),
    `eager` (launched on a GPU from Python) or `host`; the name is a field of the JSON report.
    """

    median_s: float
    low_s: float
    high_s: float
    runs: int
    mode: str

    @classmethod
    def of(cls, seconds: Sequence[float], mode: str) -> KernelTiming:
        """Summarise the times of at least one run."""
        ordered = sorted(seconds)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return cls(statistics.median(ordered), low, high, len(ordered), mode)


class Stopwatch(Protocol):
    """Measure the time of calls on one device."""

    def now(self) -> float:
        """Return host seconds since an arbitrary start."""
        ...

    def time(self, call: Call, *, waits: bool = False) -> KernelTiming:
        """Time a repeatable call, after at least one run for warm-up.

        `waits`: the call waits for the device, so it cannot be captured in a graph."""
        ...

    def launch(self, call: Call, count: int) -> tuple[float, float]:
        """Return the overhead of launching a kernel from Python and in a graph, in seconds per launch.

        `call` hardly computes. The first number is measured with `count` successive launches from Python, the second
        with one graph of as many; it is 0.0 if graphs are not supported.
        """
        ...


class HostStopwatch:
    """`Stopwatch` for calls that compute on the CPU; repeats a call for `seconds` and at least twice."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return time.perf_counter()

    def time(self, call: Call, *, waits: bool = False) -> KernelTiming:
        call()
        runs: list[float] = []
        ends = self.now() + self._seconds
        while len(runs) < 2 or (self.now() < ends and len(runs) < _MAX_RUNS):
            began = self.now()
            call()
            runs.append(self.now() - began)
        return KernelTiming.of(runs, "host")

    def launch(self, call: Call, count: int) -> tuple[float, float]:
        began = self.now()
        for _ in range(count):
            call()
        return (self.now() - began) / count, 0.0


class CudaStopwatch:
    """`Stopwatch` for calls on a GPU, with events around each call; repeats a call for about `seconds`.

    Before each call the L2 cache is overwritten. That also lets the host run ahead, so that the time does not include
    launch overhead."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._seconds = seconds
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(_FLUSHED_CACHES * cache_bytes, dtype=torch.uint8, device=device)

    def now(self) -> float:
        return time.perf_counter()

    def time(self, call: Call, *, waits: bool = False) -> KernelTiming:
        replay, mode = (call, "eager") if waits else _captured(call)
        self._run(replay, 2)
        torch.cuda.synchronize()
        began = self.now()
        self._run(replay, 3)
        each_s = (self.now() - began) / 3
        count = max(_MIN_RUNS, min(_MAX_RUNS, int(self._seconds / each_s)))
        return KernelTiming.of(self._run(replay, count), mode)

    def launch(self, call: Call, count: int) -> tuple[float, float]:
        def many() -> None:
            for _ in range(count):
                call()

        many()
        torch.cuda.synchronize()
        began = self.now()
        many()
        torch.cuda.synchronize()
        eager_s = (self.now() - began) / count
        replay, mode = _captured(many)
        if mode != "graph":
            return eager_s, 0.0
        return eager_s, statistics.median(self._run(replay, _MIN_RUNS)) / count

    def _run(self, call: Call, count: int) -> list[float]:
        events = [(_event(), _event()) for _ in range(count)]
        for began, ended in events:
            self._flush.zero_()
            began.record()
            call()
            ended.record()
        torch.cuda.synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(call: Call) -> tuple[Call, str]:
    """Return a replay of the call's graph and "graph", or the call and "eager" if it cannot be captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call, "eager"

    def replay() -> object:
        graph.replay()
        return result  # in the graph's memory, which each replay overwrites

    return replay, "graph"
