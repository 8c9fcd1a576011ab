"""Compute how long work waits at several equal workers, by formulas of queueing theory.

The probability of waiting follows Erlang's formula. The waiting time follows Allen and Cunneen's approximation of
G/G/k: it has an exponential tail whose mean grows with the variability of arrivals and of service (A. O. Allen,
"Probability, Statistics and Queueing Theory", 2nd edition, 1990, section 5.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

_NUM_POINTS = 32
_POINTS = tuple(NormalDist().inv_cdf((i + 0.5) / _NUM_POINTS) for i in range(_NUM_POINTS))
"""Quantiles of the normal distribution, each representing an equal part."""


@dataclass(frozen=True, slots=True)
class ServiceDemand:
    """Demand of `rate` jobs per second, each of which occupies one worker for `mean_s` seconds on average.

    `service_scv` and `arrival_scv` are squared coefficients of variation ((standard deviation / mean)^2) of the service
    times and of the times between arrivals; 1 for exponential times.
    """

    rate: float
    mean_s: float
    service_scv: float = 1.0
    arrival_scv: float = 1.0

    @property
    def load(self) -> float:
        """Return the mean number of busy workers."""
        return self.rate * self.mean_s

    def times(self) -> list[float]:
        """Return service times in seconds, each of which represents an equally probable part of a lognormal
        distribution with this demand's mean and variation."""
        spread = math.log1p(self.service_scv)
        return [self.mean_s * math.exp(math.sqrt(spread) * point - spread / 2) for point in _POINTS]


def erlang_c(num_workers: int, load: float) -> float:
    """Return the probability that a job has to wait because all `num_workers` workers are busy (Erlang C formula).

    `load`: the mean number of busy workers that the jobs need; the result is 1 where it is not below `num_workers`.
    """
    if load >= num_workers:
        return 1.0
    blocked = 1.0
    for k in range(1, num_workers + 1):
        blocked = load * blocked / (k + load * blocked)
    return num_workers * blocked / (num_workers - load * (1 - blocked))


def late_share(demand: ServiceDemand, num_workers: int, limit_s: float) -> float:
    """Return the fraction of jobs that end later than `limit_s` seconds after their arrival.

    A job whose service alone takes longer counts as in time, because more workers do not help it. 0 without demand.
    """
    if demand.load <= 0:
        return 0.0
    wait_probability = erlang_c(num_workers, demand.load)
    variability = (demand.arrival_scv + demand.service_scv) / 2
    tail_rate = (num_workers - demand.load) / (demand.mean_s * variability) if variability > 0 else math.inf
    slacks = [limit_s - time for time in demand.times()]
    return (
        sum(wait_probability * math.exp(-tail_rate * slack) for slack in slacks if slack > 0) / _NUM_POINTS
        if tail_rate > 0
        else 1.0
    )


def least_workers(demand: ServiceDemand, limit_s: float | None, tolerated: float, headroom: float) -> int:
    """Return the least number of workers that are idle for at least the fraction `headroom` of the time and leave at
    most the fraction `tolerated` of the jobs late.

    `limit_s`: seconds from the arrival of a job, after which its end counts as late; None: only the headroom counts.
    Returns 0 without demand.
    """
    if demand.load <= 0:
        return 0
    num_workers = max(1, math.ceil(demand.load / (1 - headroom) - 1e-9))
    if limit_s is not None:
        while late_share(demand, num_workers, limit_s) > tolerated:
            num_workers += 1
    return num_workers
