"""How durations lie, as one frozen value that travels as JSON; never counts any itself."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tandem.core.quantile_sketch import LatencySummary, QuantileSketch


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; `count` values. `buckets`, ascending: what stands for the values of one, and how many it holds; none
    where nobody kept them."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    p999: float
    max: float
    buckets: tuple[tuple[float, int], ...] = ()


def distribution(histogram: QuantileSketch) -> Distribution | None:
    """None of no values."""
    found = histogram.spread()
    if found is None:
        return None
    return of_spread(found, ((round(value, 7), number) for value, number in histogram.buckets()))


def of_spread(found: LatencySummary, buckets: Iterable[tuple[float, int]]) -> Distribution:
    return Distribution(
        count=found.count,
        mean=found.mean,
        p50=found.p50,
        p95=found.p95,
        p99=found.p99,
        p999=found.p999,
        max=found.max,
        buckets=tuple(buckets),
    )
