"""How long work waits for one of several equal workers, by formulas of queueing theory; never knows what the work is.

Erlang's formula for the share that waits at all, and Allen and Cunneen's approximation of G/G/k for how long: an
exponential tail whose mean grows with the variability of arrivals and of service (A. O. Allen, "Probability, Statistics
and Queueing Theory", 2nd edition, 1990, section 5.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

_NUM_POINTS = 32
_POINTS = tuple(NormalDist().inv_cdf((i + 0.5) / _NUM_POINTS) for i in range(_NUM_POINTS))
"""Of the normal distribution, each standing for as much of it."""


@dataclass(frozen=True, slots=True)
class ServiceDemand:
    """`rate` per second of pieces of work that take a worker `mean_s`; `service_scv` and `arrival_scv`: squared
    coefficients of variation of their times and of the times between them, 1 of exponential ones."""

    rate: float
    mean_s: float
    service_scv: float = 1.0
    arrival_scv: float = 1.0

    @property
    def load(self) -> float:
        """So many workers would be busy all the time."""
        return self.rate * self.mean_s

    def times(self) -> list[float]:
        """How long equally large parts of the work take, as if logarithms were normally distributed."""
        spread = math.log1p(self.service_scv)
        return [self.mean_s * math.exp(math.sqrt(spread) * point - spread / 2) for point in _POINTS]


def erlang_c(num_workers: int, load: float) -> float:
    """The share of Poisson arrivals that find all of `num_workers` busy; 1 where there are too few."""
    if load >= num_workers:
        return 1.0
    blocked = 1.0
    for k in range(1, num_workers + 1):
        blocked = load * blocked / (k + load * blocked)
    return num_workers * blocked / (num_workers - load * (1 - blocked))


def late_share(work: ServiceDemand, num_workers: int, limit_s: float) -> float:
    """Of pieces that are done later than `limit_s` after they came, those that are late without any wait left out: no
    number of workers mends them."""
    if work.load <= 0:
        return 0.0
    waits = erlang_c(num_workers, work.load)
    variability = (work.arrival_scv + work.service_scv) / 2
    pace = (num_workers - work.load) / (work.mean_s * variability) if variability > 0 else math.inf
    slacks = [limit_s - time for time in work.times()]
    return sum(waits * math.exp(-pace * slack) for slack in slacks if slack > 0) / _NUM_POINTS if pace > 0 else 1.0


def least_workers(work: ServiceDemand, limit_s: float | None, tolerated: float, headroom: float) -> int:
    """The fewest workers of which the share `headroom` stays idle and at most `tolerated` of the work is late; without
    a limit only the first counts."""
    if work.load <= 0:
        return 0
    number = max(1, math.ceil(work.load / (1 - headroom) - 1e-9))
    if limit_s is not None:
        while late_share(work, number, limit_s) > tolerated:
            number += 1
    return number
