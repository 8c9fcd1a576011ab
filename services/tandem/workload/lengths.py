"""Define distributions of token counts (ranges, log-normal distributions, quantiles) and return lengths from them.

`length_at` returns the length at a position in [0, 1) of a distribution; a random position gives a random length.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

MAX_TOKENS = 10_000_000
"""More than any model accepts. A longer prompt is a typing error, and would exhaust the memory."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution of token counts.

    Half of the lengths are below `median`, two thirds within a factor of e^`sigma` of it. Lengths outside of [low,
    high] become `low` or `high`. Raises ValueError where `median` is outside of [low, high] or `sigma` is negative."""

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
    """Distribution of token counts by points (share, length): the fraction `share` of lengths is at most `length`.

    `points`: in ascending order. The first has the share 0 and the shortest length, the last the share 1 and the
    longest length. Between two points the length rises linearly with the share. Raises ValueError for other points."""

    points: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        lengths = [length for _, length in self.points]
        if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1:
            raise ValueError(f"quantiles go from 0 to 1, got {shares}")
        if any(later <= earlier for earlier, later in pairwise(shares)):
            raise ValueError(f"quantiles must increase, got {shares}")
        for low, high in pairwise(lengths):
            _require_range(low, high)


Lengths = tuple[int, int] | LogNormal | Quantiles
"""A pair is a uniform distribution from the minimum to the maximum, inclusive."""


def require(lengths: Lengths) -> None:
    """Check that a distribution given as a pair (minimum, maximum) is a valid range; raises ValueError if not.

    The other kinds of distributions check themselves at construction."""
    if isinstance(lengths, tuple):
        _require_range(*lengths)


def length_at(lengths: Lengths, at: float) -> int:
    """Return the length at the quantile `at` of a distribution: the fraction `at` of all lengths is smaller.

    `at` is in [0, 1); a uniformly random `at` gives a random length of the distribution. The result is at least 1.
    """
    match lengths:
        case LogNormal(median, sigma, low, high):
            normal = NormalDist().inv_cdf(max(at, 2.0**-54))
            # Above this exponent every length is `high`, and a far greater one would overflow.
            exponent = min(sigma * normal, math.log(2 * MAX_TOKENS))
            return round(min(max(median * math.exp(exponent), low), high))
        case Quantiles(points):
            index = bisect_right(points, at, key=lambda point: point[0]) - 1
            (start, low), (end, high) = points[index], points[index + 1]
            return round(low + (high - low) * (at - start) / (end - start))
        case (low, high):
            return low + int(at * (high - low + 1))


def _require_range(low: int, high: int) -> None:
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"a range must lie within [1, {MAX_TOKENS}] and not be inverted, got [{low}, {high}]")
