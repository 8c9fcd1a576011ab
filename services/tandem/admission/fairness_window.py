"""Measure how evenly the tenants that wait for one model were served during the last minute, by Jain's index.

Jain's index (Jain, Chiu and Hawe, DEC-TR-301, 1984) of n values x is (sum x)^2 / (n * sum x^2). It is 1 when all are
equal, and k / n when k of them have equal parts and the others have nothing. The values here are what tenants were
charged per second, divided by their weights. Only tenants count that had waiting requests for at least half of the
window: a tenant that asks for less than its share gets less than others, which is not unfair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tandem.admission.tenant_queue import FlowKey
from tandem.core.lane import Lane

WINDOW_S = 60.0
PERIOD_S = 1.0
"""Seconds between two samples."""
MIN_SAMPLES = round(WINDOW_S / PERIOD_S / 2)


class _Sample(NamedTuple):
    time: float
    services: Mapping[FlowKey, float]


class FairnessWindow:
    """Keep samples of what each waiting tenant of one model was charged during the last minute, and compute Jain's
    index of these charges."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=round(WINDOW_S / PERIOD_S))

    def add(self, now: float, services: Mapping[FlowKey, float]) -> None:
        """Add a sample at the time `now`, in seconds. The caller lets at least `PERIOD_S` seconds pass between two
        samples.

        `services`: for each tenant and lane with waiting requests, the tokens that were charged so far, divided by the
        tenant's weight. A sample without entries is ignored."""
        if services:
            self._samples.append(_Sample(now, services))

    def index(self, lane: Lane, now: float) -> float:
        """Return Jain's index of the charges of one lane in the minute before `now`, the time in seconds.

        Only tenants count that had waiting requests for at least half of that minute; the index is 1 where there are
        fewer than two of them.
        """
        samples = [sample for sample in self._samples.copy() if sample.time >= now - WINDOW_S]
        seen: dict[FlowKey, list[tuple[float, float]]] = {}
        for sample in samples:
            for flow_key, service in sample.services.items():
                if flow_key.lane is lane:
                    seen.setdefault(flow_key, []).append((sample.time, service))
        rates = [_rate(points) for points in seen.values() if len(points) >= MIN_SAMPLES]
        return jain_index(rates)


def _rate(points: Sequence[tuple[float, float]]) -> float:
    (first_s, first), (last_s, last) = points[0], points[-1]
    return max(0.0, last - first) / (last_s - first_s)


def jain_index(values: Iterable[float]) -> float:
    """Return Jain's index of `values`, (sum x)^2 / (n * sum x^2); 1 where all values are 0 or there are fewer than two.
    No value may be negative."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0
