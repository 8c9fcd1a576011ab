"""How many values lie where, in bounded memory: exact while they are few, then to within 0.5 %; never keeps the order
in which they came."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

ERROR = 0.005
"""The most that a percentile may be off, relative to itself; count, sum, least and greatest are exact."""
_GAMMA = (1 + ERROR) / (1 - ERROR)
_PER_LOG = 1 / math.log(_GAMMA)
_LEAST = 1e-9
"""What is smaller counts as 0: a nanosecond."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Seconds; `count` values. Percentiles lie linearly between the two nearest ranks."""

    count: int
    mean: float
    min: float
    p50: float
    p95: float
    p99: float
    p999: float
    max: float


class QuantileSketch:
    """Keeps up to `exact` values as they are. Beyond, value x counts in bucket i where GAMMA^(i-1) < x <= GAMMA^i, of
    which there are some 3,000 between a nanosecond and three hours."""

    def __init__(self, values: Iterable[float] = (), *, exact: int = 4096) -> None:
        """As `extend`."""
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
        self.extend((value,))

    def extend(self, values: Iterable[float]) -> None:
        """Raises ValueError for a value below 0 or one that is not finite."""
        added = array("d", values)
        if not added:
            return
        low, high, total = min(added), max(added), math.fsum(added)
        if not (low >= 0 and math.isfinite(total)):
            raise ValueError(f"a histogram holds finite values from 0 on, got {low} to {high}")
        self.count += len(added)
        self.sum += total
        self.min, self.max = min(self.min, low), max(self.max, high)
        if self._values is None:
            self._fold(added)
        else:
            self._values.extend(added)
            if len(self._values) > self._num_exact:
                self._fold(self._values)
                self._values = None

    def merge(self, other: QuantileSketch) -> None:
        """Take in what the other counted."""
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
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def percentile(self, share: float) -> float:
        """`share` in [0, 1]. Raises ValueError without values."""
        return self.percentiles((share,))[0]

    def percentiles(self, shares: Iterable[float]) -> list[float]:
        """Of several shares, in one pass. Raises ValueError without values."""
        if not self.count:
            raise ValueError("no values")
        ranked = sorted(self._values) if self._values is not None else None
        ends = [] if ranked is not None else self._ends()

        def at(rank: int) -> float:
            return ranked[rank] if ranked is not None else self._at(ends, rank)

        found: list[float] = []
        for share in shares:
            place = share * (self.count - 1)
            low = int(place)
            first, second = at(low), at(min(low + 1, self.count - 1))
            found.append(first + (second - first) * (place - low))
        return found

    def spread(self) -> LatencySummary | None:
        """None of no values."""
        if not self.count:
            return None
        p50, p95, p99, p999 = self.percentiles((0.5, 0.95, 0.99, 0.999))
        return LatencySummary(self.count, self.sum / self.count, self.min, p50, p95, p99, p999, self.max)

    def buckets(self) -> list[tuple[float, int]]:
        """What stands for the values of a bucket and how many it holds, ascending: a few hundred pairs, whether values
        are still kept as they are or not."""
        if not self.count:
            return []
        if self._values is not None:
            return QuantileSketch(self._values, exact=0).buckets()
        ends = self._ends()
        counts = (seen - before for (before, _), (seen, _) in pairwise([(0, 0.0), *ends]))
        return [(self._inside(value), number) for (_, value), number in zip(ends, counts, strict=True) if number]

    def curve(self, points: int = 200) -> list[tuple[float, float]]:
        """(value, share of values up to it), for a chart; empty of no values."""
        if not self.count:
            return []
        shares = [index / points for index in range(points + 1)]
        return list(zip(self.percentiles(shares), shares, strict=True))

    # ---- inside

    def _fold(self, values: Iterable[float]) -> None:
        buckets = self._buckets
        for value in values:
            if value < _LEAST:
                self._num_zero += 1
            else:
                index = math.ceil(math.log(value) * _PER_LOG)
                buckets[index] = buckets.get(index, 0) + 1

    def _ends(self) -> list[tuple[int, float]]:
        """(how many values lie up to and in a bucket, what stands for those in it), in order."""
        ends, seen = [(self._num_zero, 0.0)], self._num_zero
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
