"""Keep the demand of the last minutes, and predict a rate from it: the mean, a linear trend, the busiest stretch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from typing import NamedTuple

from tandem.scaling.cluster_state import Demand

_MOST = 4096
"""Maximum number of intervals, whatever their length."""


class Sample(NamedTuple):
    """An `amount`, for instance of tokens, that arrived in the `seconds` seconds before the time `at`."""

    at: float
    seconds: float
    amount: float

    @property
    def rate(self) -> float:
        """Return the average amount that arrived per second: `amount` divided by `seconds`."""
        return self.amount / self.seconds


class History:
    """Keep the demand of the intervals in the last `window_s` seconds, and return it as a sum or as samples.

    The latest interval is kept even if it is older than that.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._intervals: deque[tuple[float, Demand]] = deque(maxlen=_MOST)

    def add(self, at: float, demand: Demand) -> None:
        """Add the demand of the interval that ended at `at`, and drop intervals that are too old."""
        self._intervals.append((at, demand))
        while self._intervals[0][0] <= at - self._window_s and len(self._intervals) > 1:
            self._intervals.popleft()

    @property
    def total(self) -> Demand:
        """Return the sum over all intervals. Raises TypeError when there is none."""
        return reduce(add, (demand for _, demand in self._intervals))

    def samples(self, amount: Callable[[Demand], float]) -> list[Sample]:
        """Return one sample for each interval, oldest first.

        `amount`: function that returns, from the demand of an interval, the number to sample, such as its requests.
        """
        return [Sample(at, demand.seconds, amount(demand)) for at, demand in self._intervals]


MOST_DISPERSION = 30.0
_LEAST_PAIRS = 6


def expected_level(samples: Sequence[Sample], ahead_s: float) -> float:
    """Return the rate per second to expect within `ahead_s` seconds, for capacities that depend on the mean rate.

    A line is fitted through the samples. The result is the higher of two values of the line: at the last sample, and
    `ahead_s` seconds later. Where the samples span less than `ahead_s` seconds, it is their mean rate.
    """
    if sum(sample.seconds for sample in samples) < ahead_s:
        return _mean(samples)
    return max(trend(samples, 0.0), trend(samples, ahead_s))


def expected_rate(samples: Sequence[Sample], ahead_s: float) -> float:
    """Return the rate per second for which workers should be started now, when a new worker needs `ahead_s` seconds to
    start.

    This is the higher of two rates: the trend `ahead_s` seconds ahead, and the highest past rate over any stretch of
    `ahead_s` seconds. Shorter bursts are ignored, because they would be over before a worker that is started for them
    serves.
    """
    return max(trend(samples, ahead_s), busiest(samples, ahead_s))


def trend(samples: Sequence[Sample], ahead_s: float) -> float:
    """Return the rate per second that a least-squares line through the samples has `ahead_s` seconds after the last
    sample; not negative.

    The slope is reduced by its own standard error, so that noise alone gives no trend. With fewer than three samples,
    or samples that span less than `ahead_s` seconds, the result is their mean rate.
    """
    weight = sum(sample.seconds for sample in samples)
    mean_at = sum(sample.seconds * sample.at for sample in samples) / weight
    mean_rate = sum(sample.amount for sample in samples) / weight
    spread = sum(sample.seconds * (sample.at - mean_at) ** 2 for sample in samples)
    if len(samples) < 3 or weight < ahead_s or spread <= 0:
        return mean_rate
    slope = sum(sample.seconds * (sample.at - mean_at) * (sample.rate - mean_rate) for sample in samples) / spread
    residual = sum(
        sample.seconds * (sample.rate - mean_rate - slope * (sample.at - mean_at)) ** 2 for sample in samples
    )
    error = math.sqrt(residual / (len(samples) - 2) / spread)
    significant_slope = math.copysign(max(0.0, abs(slope) - error), slope)
    return max(0.0, mean_rate + significant_slope * (samples[-1].at + ahead_s - mean_at))


def busiest(samples: Sequence[Sample], stretch_s: float) -> float:
    """Return the highest rate per second over consecutive samples that span `stretch_s` seconds or slightly more.

    Where all samples together span less, the result is their mean rate.
    """
    best = 0.0
    first = 0
    seconds = 0.0
    amount = 0.0
    for sample in samples:
        seconds = seconds + sample.seconds
        amount = amount + sample.amount
        while seconds - samples[first].seconds >= stretch_s:
            seconds = seconds - samples[first].seconds
            amount = amount - samples[first].amount
            first += 1
        if seconds >= stretch_s:
            best = max(best, amount / seconds)
    return best or _mean(samples)


def dispersion(samples: Sequence[Sample]) -> float:
    """Return how bursty arrivals are: variance divided by mean of the counts in adjacent samples, from 1 to
    MOST_DISPERSION.

    The result is 1 for a Poisson process and where there are too few samples, and greater for bursts. Adjacent samples
    are compared, so that a slowly changing rate does not count as a burst.
    """
    pairs = list(pairwise(samples))
    expected = sum(sample.amount + next_sample.amount for sample, next_sample in pairs)
    if len(pairs) < _LEAST_PAIRS or expected <= 0:
        return 1.0
    squares = 0.0
    for sample, next_sample in pairs:
        share = sample.seconds / (sample.seconds + next_sample.seconds)
        both = sample.amount + next_sample.amount
        # At a common rate, the variance of one part is `share * (1 - share)` times that of the sum.
        squares += (sample.amount - share * both) ** 2 / (share * (1 - share))
    return min(MOST_DISPERSION, max(1.0, squares / expected))


def _mean(samples: Sequence[Sample]) -> float:
    return sum(sample.amount for sample in samples) / sum(sample.seconds for sample in samples)
