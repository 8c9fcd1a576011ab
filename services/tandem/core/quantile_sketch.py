"""Summarize a distribution of numbers in bounded memory, and return its percentiles within 0.5 %.

Up to some thousand values are kept and give exact percentiles; beyond that the sketch is a DDSketch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

ERROR = 0.005
"""Largest relative error of a percentile; count, sum, minimum and maximum are exact."""
_GAMMA = (1 + ERROR) / (1 - ERROR)
_PER_LOG = 1 / math.log(_GAMMA)
_LEAST = 1e-9
"""Smaller values count as 0: a nanosecond."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Summarize latencies: their number `count`, and their mean, minimum, maximum and percentiles in seconds. `p999` is
    the 99.9th percentile. A percentile that lies between two values is interpolated linearly."""

    count: int
    mean: float
    min: float
    p50: float
    p95: float
    p99: float
    p999: float
    max: float


class QuantileSketch:
    """Count values and return their percentiles in bounded memory.

    Up to `exact` values are kept as they are. With more values only the counts of buckets are kept, which give
    percentiles within 0.5 %. Value x counts in bucket i where GAMMA^(i-1) < x <= GAMMA^i; there are some 3,000 buckets
    between a nanosecond and three hours. `count`, `sum`, `min` and `max` are always exact.
    """

    def __init__(self, values: Iterable[float] = (), *, exact: int = 4096) -> None:
        """Create a sketch of `values`; raises ValueError as `extend` does."""
        self.count = 0
        self.sum = 0.0
        self.min = math.inf
        self.max = -math.inf
        self._num_exact = exact
        self._values: array[float] | None = array("d")
        self._buckets: dict[int, int] = {}
        self._num_zero = 0
        self.extend(values)

    def add(self, value: float) -> None:
        """Add one value; raises ValueError as `extend` does."""
        self.extend((value,))

    def extend(self, values: Iterable[float]) -> None:
        """Add values. Raises ValueError for a value that is negative or not finite."""
        added = array("d", values)
        if not added:
            return
        low = min(added)
        high = max(added)
        total = math.fsum(added)
        if not (low >= 0 and math.isfinite(total)):
            raise ValueError(f"a sketch holds finite values of 0 and more, got {low} to {high}")
        self.count += len(added)
        self.sum += total
        self.min = min(self.min, low)
        self.max = max(self.max, high)
        if self._values is None:
            self._fold(added)
        else:
            self._values.extend(added)
            if len(self._values) > self._num_exact:
                self._fold(self._values)
                self._values = None

    def merge(self, other: QuantileSketch) -> None:
        """Add all values that `other` has counted; `other` is not changed."""
        if other._values is not None:
            self.extend(other._values)
            return
        if self._values is not None:
            self._fold(self._values)
            self._values = None
        for index, number in other._buckets.items():
            self._buckets[index] = self._buckets.get(index, 0) + number
        self._num_zero += other._num_zero
        self.count += other.count
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    def percentile(self, share: float) -> float:
        """Return the value below which the fraction `share` (0 to 1) of the values lies. Raises ValueError when the
        sketch is empty."""
        return self.percentiles((share,))[0]

    def percentiles(self, shares: Iterable[float]) -> list[float]:
        """Return the percentile of each fraction (0 to 1) in `shares`, in order. Raises ValueError when the sketch is
        empty."""
        if not self.count:
            raise ValueError("no values")
        ranked = sorted(self._values) if self._values is not None else None
        ends = [] if ranked is not None else self._ends()

        def at(rank: int) -> float:
            return ranked[rank] if ranked is not None else self._at(ends, rank)

        results: list[float] = []
        for share in shares:
            position = share * (self.count - 1)
            low = int(position)
            first = at(low)
            second = at(min(low + 1, self.count - 1))
            results.append(first + (second - first) * (position - low))
        return results

    def spread(self) -> LatencySummary | None:
        """Return mean, minimum, maximum and percentiles of the values; None when the sketch is empty."""
        if not self.count:
            return None
        p50, p95, p99, p999 = self.percentiles((0.5, 0.95, 0.99, 0.999))
        return LatencySummary(self.count, self.sum / self.count, self.min, p50, p95, p99, p999, self.max)

    def buckets(self) -> list[tuple[float, int]]:
        """Return pairs (typical value, count) of the buckets that are not empty, by rising value; at most a few
        thousand pairs.

        Values that are still kept exactly are put into buckets for the result.
        """
        if not self.count:
            return []
        if self._values is not None:
            return QuantileSketch(self._values, exact=0).buckets()
        ends = self._ends()
        counts = (seen - before for (before, _), (seen, _) in pairwise([(0, 0.0), *ends]))
        return [(self._inside(value), number) for (_, value), number in zip(ends, counts, strict=True) if number]

    def curve(self, points: int = 200) -> list[tuple[float, float]]:
        """Return the cumulative distribution for a chart: `points` + 1 pairs (value, fraction of values up to it).

        The fractions are equally spaced from 0 to 1. Empty when the sketch is empty.
        """
        if not self.count:
            return []
        shares = [index / points for index in range(points + 1)]
        return list(zip(self.percentiles(shares), shares, strict=True))

    # ---- buckets

    def _fold(self, values: Iterable[float]) -> None:
        buckets = self._buckets
        for value in values:
            if value < _LEAST:
                self._num_zero += 1
            else:
                index = math.ceil(math.log(value) * _PER_LOG)
                buckets[index] = buckets.get(index, 0) + 1

    def _ends(self) -> list[tuple[int, float]]:
        """Return (number of values up to and including a bucket, representative value of the bucket), in ascending
        order."""
        ends = [(self._num_zero, 0.0)]
        seen = self._num_zero
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            ends.append((seen, 2 * _GAMMA**index / (_GAMMA + 1)))
        return ends

    def _at(self, ends: list[tuple[int, float]], rank: int) -> float:
        if rank in (0, self.count - 1):
            return self.min if rank == 0 else self.max
        value = next(value for seen, value in ends if seen > rank)
        return self._inside(value)

    def _inside(self, value: float) -> float:
        return min(max(value, self.min), self.max)
