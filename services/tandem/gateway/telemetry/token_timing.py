"""Measure when the tokens of one response are sent, and the gaps between them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from operator import sub

from tandem.obs.metrics.metrics import HistogramSeries

GATHERED = 256
"""Number of send times of one choice that are evaluated together: evaluated one by one they made up a tenth of the cost
of a token, and most responses need one evaluation. Times are kept in lists, because appending to an `array` checks the
type of each number, which takes longer than reading the clock."""


class TokenTiming:
    """Measure when the tokens of one response are sent, by the clock `now`, and the gaps: the times between two tokens
    of one choice.

    Each gap is recorded in the series `gaps`, and counts as late when longer than `late_s` seconds; 0 means no limit.
    `begun` is called once with the time of the first token, which is also `first_at` (None before it). `longest_s`,
    `num_gaps` and `num_late` lag behind by up to `GATHERED` tokens per choice until `end` is called."""

    __slots__ = (
        "_begun", "_gathered", "_late_s", "_now", "_sum_s", "_times", "first_at", "gaps", "longest_s", "num_gaps",
        "num_late",
    )  # fmt: skip

    def __init__(
        self, now: Callable[[], float], gaps: HistogramSeries, late_s: float, begun: Callable[[float], None]
    ) -> None:
        self.first_at: float | None = None
        self.longest_s = 0.0
        self.num_gaps = 0
        self.num_late = 0
        self.gaps = gaps
        self._begun: Callable[[float], None] | None = begun
        self._now = now
        self._late_s = late_s or math.inf
        self._sum_s = 0.0
        self._times: dict[int, list[float]] = {}
        self._gathered: dict[int, int] = {}

    def on_token_sent(self, choice: int) -> None:
        """Record that a token of a choice is sent at this moment."""
        now, times = self._now(), self._times.get(choice)
        if times is None:
            self._first(choice, now)
            return
        times.append(now)
        if len(times) > GATHERED:
            self._gather(choice, times)

    def end(self) -> None:
        """Evaluate the send times that are left, so that all counts are final. The callback `begun` is not called from
        then on."""
        self._begun = None
        for choice, times in self._times.items():
            self._gather(choice, times)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens sent so far, of all choices."""
        return self.num_gaps + sum(map(len, self._times.values()))

    def num_of(self, choice: int) -> int:
        """Return the number of tokens of one choice sent so far."""
        return self._gathered.get(choice, 0) + len(self._times.get(choice, ()))

    @property
    def mean_s(self) -> float | None:
        """Return the mean of the gaps in seconds; None where there is none. Before `end` it covers only the gaps
        evaluated so far."""
        return self._sum_s / self.num_gaps if self.num_gaps else None

    def _first(self, choice: int, now: float) -> None:
        self._times[choice] = [now]
        if self.first_at is None:
            self.first_at = now
            # Drop the callback: its owner refers to this object, a cycle that only the garbage collector would free.
            begun, self._begun = self._begun, None
            if begun is not None:
                begun(now)

    def _gather(self, choice: int, times: list[float]) -> None:
        """Evaluate the gaps between `times` and keep only the last time, where the next gap begins."""
        if len(times) < 2:
            return
        gaps = sorted(map(sub, islice(times, 1, None), times))
        longest = gaps[-1]
        self.gaps.record_sorted(gaps)
        self.num_gaps += len(gaps)
        self._gathered[choice] = self._gathered.get(choice, 0) + len(gaps)
        self._sum_s += times[-1] - times[0]
        self.longest_s = max(self.longest_s, longest)
        if longest > self._late_s:
            self.num_late += len(gaps) - bisect_right(gaps, self._late_s)
        del times[:-1]
