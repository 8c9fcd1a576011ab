"""Keep the demand of the last minutes by interval, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import NamedTuple

from tandem.scaling.cluster_state import Demand

_MOST = 4096
"""Maximum number of intervals, whatever their length."""


class Sample(NamedTuple):
    """An `amount` that arrived in the `seconds` before `at`."""

    at: float
    seconds: float
    amount: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


class History:
    """Keep the intervals that ended within `window_s` of the last one, and at least the last one."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._intervals: deque[tuple[float, Demand]] = deque(maxlen=_MOST)

    def add(self, at: float, demand: Demand) -> None:
        self._intervals.append((at, demand))
        while self._intervals[0][0] <= at - self._window_s and len(self._intervals) > 1:
            self._intervals.popleft()

    def __len__(self) -> int:
        return len(self._intervals)

    @property
    def total(self) -> Demand:
        """Return the sum over all intervals. Raises TypeError when there is none."""
        return reduce(add, (demand for _, demand in self._intervals))

    def samples(self, amount: Callable[[Demand], float]) -> list[Sample]:
        """Return one sample for each interval, in order."""
        return [Sample(at, demand.seconds, amount(demand)) for at, demand in self._intervals]

    def __repr__(self) -> str:
        return f"<history of {len(self)} intervals>"
