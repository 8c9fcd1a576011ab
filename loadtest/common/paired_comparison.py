"""Estimate how much more one of two variants costs, from alternating rounds on a machine of changing speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
_AT_ONCE = 1 << 16
"""Number of pairwise means that are computed at once."""


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """Cost that `on` adds over pairs of neighbouring rounds, as a share of `off`, with its interval.

    `low` and `high` bound the share at confidence `CONFIDENCE` (bootstrap over pairs). The share is the median of the
    pairwise means of the ratios' logarithms (Hodges and Lehmann, 1963): nearly as robust to delayed rounds as the
    median of all ratios, and more precise under usual noise. `off` and `on` are the medians of each side by itself.
    """

    num_pairs: int
    off: float
    on: float
    share: float
    low: float
    high: float

    def verdict(self, limit: float) -> str:
        if self.high < limit:
            return "under"
        return "OVER" if self.low > limit else "not decided"


class Timed(msgspec.Struct, frozen=True, array_like=True):
    """Cost of a round, and the seconds that a constant piece of work took during it. Both are above 0."""

    cost: float
    core_speed: float


def levelled(pairs: Sequence[tuple[Timed, Timed]]) -> tuple[list[tuple[float, float]], float]:
    """Return the costs adjusted to the machine's average speed, and the exponent of the adjustment.

    Costs are assumed to follow the time of the constant reference work by a power, the exponent. It is fitted by least
    squares over all rounds, each side about its own mean (analysis of covariance). Neither side may slow the reference
    work down: an influence of a side is mistaken for the machine's speed. See `drift`.
    """
    if not pairs:
        return [], 0.0
    logs = np.log([[(each.cost, each.core_speed) for each in pair] for pair in pairs])
    cost, core_speed = (logs - logs.mean(axis=0)).reshape(-1, 2).T
    spread = float(core_speed @ core_speed)
    power = float(cost @ core_speed) / spread if spread > 0 else 0.0
    costs = np.exp(logs[..., 0] - power * (logs[..., 1] - logs[..., 1].mean()))
    return [(float(off), float(on)) for off, on in costs], power


def drift(pairs: Sequence[tuple[Timed, Timed]]) -> Added:
    """Return how much longer the reference work takes during rounds of the variant `on` than during rounds of `off`.

    Zero when only other programs decide the machine's speed.
    """
    return added([(off.core_speed, on.core_speed) for off, on in pairs])


def added(pairs: Sequence[tuple[float, float]], seed: int = 1) -> Added:
    """Return the cost that `on` adds to `off`, from pairs (off, on) of costs above 0. Raises ValueError without any
    pair."""
    if not pairs:
        raise ValueError("no pairs")
    costs = np.asarray(pairs, dtype=float)
    ratios = np.log(costs[:, 1] / costs[:, 0])
    resampled = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(_middle(ratios[resampled]), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    off, on = np.median(costs, axis=0)
    return Added(
        num_pairs=len(pairs),
        off=float(off),
        on=float(on),
        share=math.expm1(_middle(ratios[None])[0]),
        low=math.expm1(low),
        high=math.expm1(high),
    )


def _middle(values: np.ndarray) -> np.ndarray:
    """Return the median of the pairwise means of each row of [rows, N]; each value is also paired with itself."""
    first, second = np.triu_indices(values.shape[1])
    # Many pairs are handled some rows at a time, in memory that fits a cache.
    parts = np.array_split(values, -(-values.shape[0] * len(first) // _AT_ONCE))
    return np.concatenate([np.median((part[:, first] + part[:, second]) / 2, axis=1) for part in parts])
