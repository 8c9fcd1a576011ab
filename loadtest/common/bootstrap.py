"""Estimate how far a ratio of two percentiles may be off by chance, by a bootstrap over requests.

Requests are resampled with replacement, each with all its values, because the gaps of one request are correlated.
Requests that waited in one queue are correlated too, which the bootstrap does not model: the intervals are too narrow
rather than too wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

ROUNDS = 500
CONFIDENCE = 0.95


class Interval(NamedTuple):
    low: float
    high: float


def ratio_intervals(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], shares: Sequence[float], seed: int
) -> list[Interval | None]:
    """Return the interval of ours / theirs, at confidence `CONFIDENCE`, for the percentile at each of `shares`.

    Values are grouped by request. An interval is None where a side has no values.
    """
    chance = np.random.default_rng(seed)
    sides = [_resampled_percentiles(side, shares, chance) for side in (ours, theirs)]
    if sides[0] is None or sides[1] is None:
        return [None] * len(shares)
    return [_middle(ratio) for ratio in (sides[0] / sides[1]).T]


def share_ratio_interval(ours: tuple[int, int], theirs: tuple[int, int], seed: int) -> Interval | None:
    """Return the interval of the ratio ours / theirs of two shares, each given as (count, total), at confidence
    `CONFIDENCE`."""
    chance = np.random.default_rng(seed)
    if not all(number and of for number, of in (ours, theirs)):
        return None
    a, b = (chance.binomial(of, number / of, ROUNDS) / of for number, of in (ours, theirs))
    return _middle(a[b > 0] / b[b > 0])


def _middle(ratios: Any) -> Interval:
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def _resampled_percentiles(requests: Sequence[Sequence[float]], shares: Sequence[float], chance: Any) -> Any:
    """Return percentiles of resampled requests, an array [ROUNDS, len(shares)] in seconds."""
    counted = [values for values in requests if len(values)]
    if not counted:
        return None
    values = np.concatenate([np.asarray(one, dtype=float) for one in counted])
    owners = np.repeat(np.arange(len(counted)), [len(one) for one in counted])
    order = np.argsort(values)
    values, owners = values[order], owners[order]
    found = np.empty((ROUNDS, len(shares)))
    for number in range(ROUNDS):
        counts = np.bincount(chance.integers(len(counted), size=len(counted)), minlength=len(counted))
        ranks = np.cumsum(counts[owners])
        places = np.asarray(shares) * (ranks[-1] - 1)
        low, high = (values[np.searchsorted(ranks, side(places), side="right")] for side in (np.floor, np.ceil))
        found[number] = low + (high - low) * (places - np.floor(places))
    return found
