"""When the tokens of one answer left, and the gaps between them; never holds one back."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from operator import sub

from tandem.obs.metrics.metrics import HistogramSeries

GATHERED = 256
"""Times of a choice that wait to be looked at together: one by one they were a tenth of what a token costs, and once in
most answers is enough. In lists: an array asks each number what it is, which takes longer than reading the clock."""


class TokenTiming:
    """On the clock that `now` reads. A gap is between two tokens of one choice; one that is longer than `late_s` is
    late, and 0 promises nothing. All gaps go into `gaps` too, and `begun` hears when the first token leaves."""

    __slots__ = (
        "_begun", "_gathered", "_late_s", "_sum_s", "_times", "first_at", "gaps", "longest_s", "now", "num_gaps",
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
        self.now = now
        self._late_s = late_s or math.inf
        self._sum_s = 0.0
        self._times: dict[int, list[float]] = {}
        self._gathered: dict[int, int] = {}

    def on_token_sent(self, choice: int) -> list[float]:
        """A token did, now. The times of this choice's next ones may be added to what comes back until it has
        `GATHERED`: to come here for every token of every stream, and to fetch what is used here, takes twice as long.
        """
        now, times = self.now(), self._times.get(choice)
        if times is None:
            return self._first(choice, now)
        times.append(now)
        if len(times) > GATHERED:
            self._gather(choice, times)
        return times

    def end(self) -> None:
        """Count what is left to be counted. Nobody hears of it any more."""
        self._begun = None
        for choice, times in self._times.items():
            self._gather(choice, times)

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return self.num_gaps + sum(map(len, self._times.values()))

    def num_of(self, choice: int) -> int:
        """Tokens of one choice."""
        return self._gathered.get(choice, 0) + len(self._times.get(choice, ()))

    @property
    def mean_s(self) -> float | None:
        """Of all gaps; None: there is none."""
        return self._sum_s / self.num_gaps if self.num_gaps else None

    def _first(self, choice: int, now: float) -> list[float]:
        times = self._times[choice] = [now]
        if self.first_at is None:
            self.first_at = now
            # Whoever hears it knows this pace: a circle, which only the garbage collector would find.
            begun, self._begun = self._begun, None
            if begun is not None:
                begun(now)
        return times

    def _gather(self, choice: int, times: list[float]) -> None:
        """The last one stays, as the next gap's beginning."""
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
