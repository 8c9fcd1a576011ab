"""How long a call takes, on a GPU or on the host; never knows what the call computes."""

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
"""A flush writes so many times the L2."""


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Seconds of one call: the median of `runs`, and the spread from the first to the ninth decile. `way` is `graph`
    (replayed on a GPU), `eager` (launched there by Python) or `host`."""

    median_s: float
    low_s: float
    high_s: float
    runs: int
    way: str

    @classmethod
    def of(cls, seconds: Sequence[float], way: str) -> KernelTiming:
        """Of at least one run."""
        ordered = sorted(seconds)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return cls(statistics.median(ordered), low, high, len(ordered), way)


class Stopwatch(Protocol):
    """Times calls on one device."""

    def now(self) -> float:
        """Host seconds from an arbitrary start."""
        ...

    def time(self, call: Call, *, waits: bool = False) -> KernelTiming:
        """Of a call that may be repeated; it has run once before the clock starts. One that waits for the device cannot
        be captured in a graph."""
        ...

    def launch(self, call: Call, count: int) -> tuple[float, float]:
        """Seconds of each of `count` calls in a row that hardly compute: launched one by one, and in a graph (0.0
        where there are none)."""
        ...


class HostStopwatch:
    """Calls that compute on the CPU, for `seconds` and at least twice."""

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
    """Calls on a GPU, by events around each, for about `seconds`. What the last call left in the L2 is written over
    before the next, which also lets the host run ahead, so that no launch is in the time."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._seconds = seconds
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(_FLUSHED_CACHES * cache_bytes, dtype=torch.uint8, device=device)

    def now(self) -> float:
        return time.perf_counter()

    def time(self, call: Call, *, waits: bool = False) -> KernelTiming:
        replay, way = (call, "eager") if waits else _captured(call)
        self._run(replay, 2)
        torch.cuda.synchronize()
        began = self.now()
        self._run(replay, 3)
        each_s = (self.now() - began) / 3
        count = max(_MIN_RUNS, min(_MAX_RUNS, int(self._seconds / each_s)))
        return KernelTiming.of(self._run(replay, count), way)

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
        replay, way = _captured(many)
        if way != "graph":
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
    """A graph of the call where it can be captured, as the decoder's steps are; else the call itself."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call, "eager"

    def replay() -> object:
        graph.replay()
        return kept  # its memory is the graph's

    return replay, "graph"
