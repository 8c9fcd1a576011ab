"""Counts of durations in buckets that grow by one percent; never keeps the durations, so its size is bounded.

From a microsecond to a day there are some 2,500 buckets. A value is told as its bucket's middle, so every percentile
is within half a percent; least and greatest are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

GROWTH = 1.01
LEAST_S = 1e-6
_PER_LOG = 1 / math.log(GROWTH)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; `count` values. `buckets` are the middles of those that hold any, ascending, and how many each holds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    p999: float
    max: float
    buckets: tuple[tuple[float, int], ...] = ()


class Histogram:
    def __init__(self, values: Iterable[float] = ()) -> None:
        self.count = 0
        self._sum = 0.0
        self._least, self._greatest = math.inf, -math.inf
        self._counts: dict[int, int] = {}
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        index = int(math.log(value / LEAST_S) * _PER_LOG) if value > LEAST_S else 0
        self._counts[index] = self._counts.get(index, 0) + 1
        self.count += 1
        self._sum += value
        self._least = min(self._least, value)
        self._greatest = max(self._greatest, value)

    def merge(self, other: Histogram) -> None:
        for index, number in other._counts.items():
            self._counts[index] = self._counts.get(index, 0) + number
        self.count += other.count
        self._sum += other._sum
        self._least = min(self._least, other._least)
        self._greatest = max(self._greatest, other._greatest)

    def percentile(self, share: float) -> float:
        """Linear between the two nearest ranks, as numpy does. Raises ValueError without values."""
        if not self.count:
            raise ValueError("no values")
        place = share * (self.count - 1)
        low, high = self._at(int(place)), self._at(math.ceil(place))
        return low + (high - low) * (place - int(place))

    def distribution(self) -> Distribution | None:
        """None of no values."""
        if not self.count:
            return None
        return Distribution(
            count=self.count,
            mean=self._sum / self.count,
            p50=self.percentile(0.5),
            p95=self.percentile(0.95),
            p99=self.percentile(0.99),
            p999=self.percentile(0.999),
            max=self._greatest,
            buckets=tuple((round(self._middle(i), 7), self._counts[i]) for i in sorted(self._counts)),
        )

    def _at(self, rank: int) -> float:
        """The value of that rank, from 0."""
        if rank == 0:
            return self._least
        if rank == self.count - 1:
            return self._greatest
        for index in sorted(self._counts):
            rank -= self._counts[index]
            if rank < 0:
                return self._middle(index)
        raise AssertionError(f"{self.count} values, but {sum(self._counts.values())} in buckets")

    def _middle(self, index: int) -> float:
        return min(max(LEAST_S * math.pow(GROWTH, index + 0.5), self._least), self._greatest)
