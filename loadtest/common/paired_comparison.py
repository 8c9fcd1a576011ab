"""What one of two ways costs more than the other, from rounds of both in turn on a noisy machine; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

DRAWS = 2000
CONFIDENCE = 0.95
_AT_ONCE = 1 << 16
"""Means of two."""


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """What `on` costs more than `off` over pairs of neighbouring rounds, as a share of `off`, and where that lies with
    `CONFIDENCE` (the bootstrap over pairs). It is by the median of the means of any two ratios, as logarithms (Hodges
    and Lehmann, 1963): nearly as deaf to rounds that were held up as the median of all, and surer where noise is as it
    usually is. `off` and `on` are the medians of each by itself."""

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
    """A cost, and what a piece of work that is always the same took meanwhile. Both above 0."""

    cost: float
    yardstick: float


def levelled(pairs: Sequence[tuple[Timed, Timed]]) -> tuple[list[tuple[float, float]], float]:
    """Costs as they would be were the machine always as fast as it is on average, and the power of the yardstick that
    they follow: by least squares over all rounds, each side about its own mean (analysis of covariance). The yardstick
    is to be one that neither side makes longer: what they do to it themselves is taken for speed. See `drift`."""
    if not pairs:
        return [], 0.0
    logs = np.log([[(each.cost, each.yardstick) for each in pair] for pair in pairs])
    cost, yardstick = (logs - logs.mean(axis=0)).reshape(-1, 2).T
    spread = float(yardstick @ yardstick)
    power = float(cost @ yardstick) / spread if spread > 0 else 0.0
    costs = np.exp(logs[..., 0] - power * (logs[..., 1] - logs[..., 1].mean()))
    return [(float(off), float(on)) for off, on in costs], power


def drift(pairs: Sequence[tuple[Timed, Timed]]) -> Added:
    """By how much the yardstick is longer beside `on`. Nothing, if only others decide how fast the machine is."""
    return added([(off.yardstick, on.yardstick) for off, on in pairs])


def added(pairs: Sequence[tuple[float, float]], seed: int = 1) -> Added:
    """Of costs (off, on), both above 0. Raises ValueError without any."""
    if not pairs:
        raise ValueError("no pairs")
    costs = np.asarray(pairs, dtype=float)
    ratios = np.log(costs[:, 1] / costs[:, 0])
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(DRAWS, len(ratios)))
    low, high = np.quantile(_middle(ratios[drawn]), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
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
    """Of each row [rows, N]; each value counts with itself too."""
    first, second = np.triu_indices(values.shape[1])
    # Of many pairs some rows at a time, in memory that a cache can hold.
    parts = np.array_split(values, -(-values.shape[0] * len(first) // _AT_ONCE))
    return np.concatenate([np.median((part[:, first] + part[:, second]) / 2, axis=1) for part in parts])
