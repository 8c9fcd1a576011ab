"""Generate arrival times: evenly spaced, Poisson, in bursts or in batches, as functions of a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from tandem.workload import seeded_random


@dataclass(frozen=True, slots=True)
class Constant:
    """Arrival process with one request every 1/rate seconds, the first at 0 s."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Poisson arrival process: the times between requests are independent and exponentially distributed."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """Arrival process that alternates between bursts and pauses, with Poisson arrivals in both.

    `on_s`, `off_s`: mean duration of a burst and of a pause in seconds, exponentially distributed. `outside`: rate in a
    pause as a fraction of the rate in a burst, in [0, 1). Raises ValueError for other values."""

    on_s: float
    off_s: float
    outside: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.on_s < math.inf and 0 < self.off_s < math.inf):
            raise ValueError(f"on_s and off_s are seconds above 0, got {self.on_s} and {self.off_s}")
        if not 0 <= self.outside < 1:
            raise ValueError(f"outside is a share in [0, 1) of the rate inside, got {self.outside}")


@dataclass(frozen=True, slots=True)
class Batches:
    """Arrival process with `size` requests at the same time, and exponentially distributed times between these batches.

    Raises ValueError unless `size` is at least 1."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


Arrivals = Constant | Poisson | Bursts | Batches


def due_times(arrivals: Arrivals, rate: float, *names: seeded_random.Name) -> Iterator[float]:
    """Return an endless iterator over the arrival times in seconds from the start, in ascending order.

    `arrivals`: the arrival process. `rate`: requests per second in the long run, over bursts and pauses alike; 0 puts
    all arrivals at 0 s. `names`: seed of the random numbers, followed by names that distinguish this process from
    others with the same seed."""
    if rate == 0:
        return (0.0 for _ in count())
    match arrivals:
        case Constant():
            return (number / rate for number in count())
        case Poisson():
            return _poisson(rate, names)
        case Bursts():
            return _bursts(arrivals, rate, names)
        case Batches(size):
            return (due_s for due_s in _poisson(rate / size, names) for _ in range(size))


def _poisson(rate: float, names: tuple[seeded_random.Name, ...]) -> Iterator[float]:
    due_s = 0.0
    for number in count():
        due_s += seeded_random.exponential(1 / rate, *names, "wait", number)
        yield due_s


def _bursts(bursts: Bursts, rate: float, names: tuple[seeded_random.Name, ...]) -> Iterator[float]:
    """Yield arrivals of a Poisson process of rate 1 whose time is stretched to each phase's rate."""
    cycle_s = bursts.on_s + bursts.off_s
    inside = rate * cycle_s / (bursts.on_s + bursts.outside * bursts.off_s)
    is_first_on = seeded_random.uniform(*names, "first phase") < bursts.on_s / cycle_s
    due = _poisson(1.0, names)
    next_due = next(due)
    passed = 0.0
    began_s = 0.0
    for number in count():
        is_on = (number % 2 == 0) == is_first_on
        seconds = seeded_random.exponential(bursts.on_s if is_on else bursts.off_s, *names, "phase", number)
        phase_rate = inside if is_on else inside * bursts.outside
        while phase_rate > 0 and next_due <= passed + phase_rate * seconds:
            yield began_s + (next_due - passed) / phase_rate
            next_due = next(due)
        passed += phase_rate * seconds
        began_s += seconds
