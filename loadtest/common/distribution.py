"""Define a distribution of durations as one frozen value that serializes as JSON."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tandem.core.quantile_sketch import LatencySummary, QuantileSketch


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of `count` durations, in seconds.

    `buckets` are ascending pairs of a bucket's representative value and its count; empty where none were kept.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    p999: float
    max: float
    buckets: tuple[tuple[float, int], ...] = ()


def distribution(histogram: QuantileSketch) -> Distribution | None:
    """Return the distribution of a sketch; None when it holds no values."""
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
