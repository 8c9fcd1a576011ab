"""What rate to expect some time ahead, from samples of the past: their mean, a line through them, their busiest
stretch; never knows what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from tandem.scaling.demand_history import Sample

MOST_DISPERSION = 30.0
_LEAST_PAIRS = 6


def expected_level(samples: Sequence[Sample], ahead_s: float) -> float:
    """The highest of a line through the samples, from the last of them to `ahead_s` later. Of less than that, the
    mean."""
    if sum(one.seconds for one in samples) < ahead_s:
        return _mean(samples)
    return max(trend(samples, 0.0), trend(samples, ahead_s))


def expected_rate(samples: Sequence[Sample], ahead_s: float) -> float:
    """The higher of where the line leads and of what has come within `ahead_s` at once already: a burst that is over
    sooner than a worker starts cannot be answered, only be expected again."""
    return max(trend(samples, ahead_s), busiest(samples, ahead_s))


def trend(samples: Sequence[Sample], ahead_s: float) -> float:
    """Per second, `ahead_s` after the last sample, of a line by least squares through at least as long a past. Its
    slope counts as far as it is beyond its own standard error, so noise alone is no trend."""
    weight = sum(one.seconds for one in samples)
    mean_at = sum(one.seconds * one.at for one in samples) / weight
    mean_rate = sum(one.amount for one in samples) / weight
    spread = sum(one.seconds * (one.at - mean_at) ** 2 for one in samples)
    if len(samples) < 3 or weight < ahead_s or spread <= 0:
        return mean_rate
    slope = sum(one.seconds * (one.at - mean_at) * (one.rate - mean_rate) for one in samples) / spread
    left = sum(one.seconds * (one.rate - mean_rate - slope * (one.at - mean_at)) ** 2 for one in samples)
    error = math.sqrt(left / (len(samples) - 2) / spread)
    sure = math.copysign(max(0.0, abs(slope) - error), slope)
    return max(0.0, mean_rate + sure * (samples[-1].at + ahead_s - mean_at))


def busiest(samples: Sequence[Sample], stretch_s: float) -> float:
    """The highest rate over any stretch of neighbours that lasts `stretch_s` or a little longer; over all where that is
    not as long."""
    best, first, seconds, amount = 0.0, 0, 0.0, 0.0
    for one in samples:
        seconds, amount = seconds + one.seconds, amount + one.amount
        while seconds - samples[first].seconds >= stretch_s:
            seconds, amount = seconds - samples[first].seconds, amount - samples[first].amount
            first += 1
        if seconds >= stretch_s:
            best = max(best, amount / seconds)
    return best or _mean(samples)


def dispersion(samples: Sequence[Sample]) -> float:
    """Variance by mean of the counts of neighbouring samples, 1 of a Poisson process and more where arrivals come in
    bursts; 1 where too little has come to say. Neighbours are compared, so that a rate that changes slowly is none."""
    pairs = list(pairwise(samples))
    expected = sum(one.amount + other.amount for one, other in pairs)
    if len(pairs) < _LEAST_PAIRS or expected <= 0:
        return 1.0
    squares = 0.0
    for one, other in pairs:
        share = one.seconds / (one.seconds + other.seconds)
        both = one.amount + other.amount
        # Of counts of one rate, the variance of the part is `share * (1 - share)` times that of the whole.
        squares += (one.amount - share * both) ** 2 / (share * (1 - share))
    return min(MOST_DISPERSION, max(1.0, squares / expected))


def _mean(samples: Sequence[Sample]) -> float:
    return sum(one.amount for one in samples) / sum(one.seconds for one in samples)
