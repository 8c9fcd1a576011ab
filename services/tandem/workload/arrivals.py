"""Generate arrival times: evenly spaced, Poisson, in bursts or in batches, as functions of a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from tandem.workload import seeded_random


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1/rate seconds, the first at 0."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, with exponential times between them."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """A Poisson process that alternates between two rates, for exponential times of `on_s` and `off_s` seconds on
    average.

    Outside of bursts the rate is the fraction `outside` of the rate inside, in [0, 1). Raises ValueError for other
    values.
    """

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
    """`size` requests at once, exponential times between batches. Raises ValueError unless `size` is at least 1."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


Arrivals = Constant | Poisson | Bursts | Batches


def due_times(arrivals: Arrivals, rate: float, *names: seeded_random.Name) -> Iterator[float]:
    """Return the arrival times in seconds, in ascending order, without end.

    `rate` per second is the long-run mean, over bursts and pauses alike; 0 puts all arrivals at 0. `names` seed the
    random numbers.
    """
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
