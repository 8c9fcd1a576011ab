"""Record a run over time in bounded memory: tokens and worst gaps of each window, and samples of each pool.

Recording schedules no event, so it does not change the digest of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.config import Pool
from tandem.core.quantile_sketch import QuantileSketch
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster

MAX_POINTS = 240
_EXACT = 256


@dataclass(frozen=True, slots=True)
class SimWindow:
    """Describe one time window, which begins at the virtual time `begin_s`.

    `output_rate`: output tokens per second. `itl_p99_s`: 99th percentile, in seconds, of the token gaps that ended in
    the window; None without gaps.
    """

    begin_s: float
    output_rate: float
    itl_p99_s: float | None


@dataclass(frozen=True, slots=True)
class PoolSample:
    """Sample of one pool at the virtual time `time_s`.

    - `utilisation`: share of the time since the previous sample in which its workers computed.
    - `num_waiting`, `num_running`: requests at the pool's workers.
    """

    time_s: float
    utilisation: float
    num_waiting: int
    num_running: int


@dataclass(slots=True)
class _Count:
    num_tokens: int = 0
    gaps: QuantileSketch = field(default_factory=lambda: QuantileSketch(exact=_EXACT))

    def merge(self, other: _Count) -> None:
        self.num_tokens += other.num_tokens
        self.gaps.merge(other.gaps)


class Series:
    """Record a run over time for charts: what clients received in each time window, and samples of pools and queues.

    A window is `width_s` seconds wide at first. It holds the number of output tokens that clients received in it, and
    the gaps between tokens that ended in it. When there would be more than `MAX_POINTS` windows, the width doubles and
    every two neighbours are merged into one. A sample is taken only when `look` is called, which happens when a request
    arrives or ends, so there are few samples of an idle cluster.
    """

    def __init__(self, width_s: float = 0.25) -> None:
        self._width_s = width_s
        self._counts: dict[int, _Count] = {}
        self._sample_s = width_s
        self._next_s = 0.0
        self.queued: list[tuple[float, int]] = []
        """Pairs of the virtual time and the number of requests that wait at the gateways."""
        self._pools: dict[Pool, list[tuple[float, float, int, int]]] = {}
        self._sizes: dict[Pool, int] = {}

    def add(self, trace: ClientTrace) -> None:
        """Add the tokens and gaps of a request that has ended to their windows."""
        before = None
        for time in trace.token_times:
            count = self._at(time)
            count.num_tokens += 1
            if before is not None:
                count.gaps.add(time - before)
            before = time

    def look(self, cluster: SimCluster) -> None:
        """Sample the cluster as it is now; do nothing if less than one sampling interval has passed since the last
        sample."""
        if cluster.now < self._next_s:
            return
        self._next_s = cluster.now + self._sample_s
        self.queued.append((cluster.now, cluster.num_queued))
        for pool in sorted({worker.spec.pool for worker in cluster.workers}):
            workers = [worker for worker in cluster.workers if worker.spec.pool == pool]
            loads = [worker.engine.load() for worker in workers]
            self._sizes[pool] = len(workers)
            self._pools.setdefault(pool, []).append((
                cluster.now,
                sum(worker.busy_s for worker in workers),
                sum(load.num_waiting for load in loads),
                sum(load.num_running for load in loads),
            ))  # fmt: skip
        if len(self.queued) > MAX_POINTS:
            self._sample_s *= 2
            self.queued = self.queued[::2]
            self._pools = {pool: samples[::2] for pool, samples in self._pools.items()}

    def windows(self) -> list[SimWindow]:
        return [
            SimWindow(
                index * self._width_s,
                count.num_tokens / self._width_s,
                count.gaps.percentile(0.99) if count.gaps.count else None,
            )
            for index, count in sorted(self._counts.items())
        ]

    def pools(self) -> dict[Pool, list[PoolSample]]:
        return {pool: _differences(samples, self._sizes[pool]) for pool, samples in self._pools.items()}

    def _at(self, time: float) -> _Count:
        while time >= MAX_POINTS * self._width_s:
            self._width_s *= 2
            halved: dict[int, _Count] = {}
            for index, count in self._counts.items():
                halved.setdefault(index // 2, _Count()).merge(count)
            self._counts = halved
        return self._counts.setdefault(int(time / self._width_s), _Count())


def _differences(samples: Sequence[tuple[float, float, int, int]], num_workers: int) -> list[PoolSample]:
    """Convert samples of cumulative busy seconds to utilisation. Busy seconds count ended steps only, so a long step
    may show one sample late."""
    out: list[PoolSample] = []
    time_before = busy_before = 0.0
    for time, busy, num_waiting, num_running in samples:
        lasted = (time - time_before) * num_workers
        utilisation = min(1.0, (busy - busy_before) / lasted) if lasted else 0.0
        out.append(PoolSample(time, utilisation, num_waiting, num_running))
        time_before, busy_before = time, busy
    return out
