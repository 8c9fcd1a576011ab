"""How many tokens: ranges, log-normal laws and quantiles, as functions of where in [0, 1) a draw falls; never draws."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

MAX_TOKENS = 10_000_000
"""More than any model takes. A longer prompt is a slip of the pen, and would fill the memory."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Half of the lengths lie below `median`, two thirds within a factor of e^`sigma` of it. What falls outside of
    [low, high] becomes the nearer of the two. Raises ValueError where these are not in order."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _require_range(self.low, self.high)
        if not self.low <= self.median <= self.high:
            raise ValueError(f"the median must lie within [{self.low}, {self.high}], got {self.median}")
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must not be negative, got {self.sigma}")


@dataclass(frozen=True, slots=True)
class Quantiles:
    """(share, length): that share of all lengths is at most so long; evenly in between. From share 0, the least, to
    share 1, the most. Raises ValueError where these are not in order."""

    points: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        shares, lengths = [share for share, _ in self.points], [length for _, length in self.points]
        if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1:
            raise ValueError(f"quantiles go from 0 to 1, got {shares}")
        if any(later <= earlier for earlier, later in pairwise(shares)):
            raise ValueError(f"quantiles must increase, got {shares}")
        for low, high in pairwise(lengths):
            _require_range(low, high)


Lengths = tuple[int, int] | LogNormal | Quantiles
"""A pair is the least and the most, each length in between as likely as any other."""


def require(lengths: Lengths) -> None:
    """Raises ValueError where a pair is no range; the other kinds have seen to it themselves."""
    if isinstance(lengths, tuple):
        _require_range(*lengths)


def length_at(lengths: Lengths, at: float) -> int:
    """The length below which the share `at` of all lengths lies, `at` in [0, 1). At least 1."""
    match lengths:
        case LogNormal(median, sigma, low, high):
            normal = NormalDist().inv_cdf(max(at, 2.0**-54))
            return round(min(max(median * math.exp(sigma * normal), low), high))
        case Quantiles(points):
            index = bisect_right(points, at, key=lambda point: point[0]) - 1
            (start, low), (end, high) = points[index], points[index + 1]
            return round(low + (high - low) * (at - start) / (end - start))
        case (low, high):
            return low + int(at * (high - low + 1))


def _require_range(low: int, high: int) -> None:
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"a range must lie within [1, {MAX_TOKENS}] and not be inverted, got [{low}, {high}]")
