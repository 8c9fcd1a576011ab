"""When the tokens of one answer left, and the gaps between them; never holds one back."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from operator import sub

from tandem.obs.metrics import Buckets

_GATHERED = 256
"""Times of a choice that wait to be looked at together: one by one they were a tenth of what a token costs, and once in
most answers is enough. In arrays: objects lie wherever there was room, and each has to be fetched."""


class Pace:
    """On the clock that `now` reads. A gap is between two tokens of one choice; one that is longer than `late_s` is
    late, and 0 promises nothing. All gaps go into `gaps` too, and `begun` hears when the first token leaves."""

    __slots__ = (
        "_begun", "_gathered", "_late_s", "_now", "_stamps", "_sum_s", "first_at", "gaps", "longest_s", "num_gaps",
        "num_late",
    )  # fmt: skip

    def __init__(self, now: Callable[[], float], gaps: Buckets, late_s: float, begun: Callable[[float], None]) -> None:
        self.first_at: float | None = None
        self.longest_s = 0.0
        self.num_gaps = 0
        self.num_late = 0
        self.gaps = gaps
        self._begun: Callable[[float], None] | None = begun
        self._now = now
        self._late_s = late_s or math.inf
        self._sum_s = 0.0
        self._stamps: dict[int, array[float]] = {}
        self._gathered: dict[int, int] = {}

    def left(self, choice: int) -> None:
        """Called for every token of every stream."""
        try:
            stamps = self._stamps[choice]
        except KeyError:
            self._first(choice, self._now())
            return
        stamps.append(self._now())
        if len(stamps) > _GATHERED:
            self._gather(choice, stamps)

    def end(self) -> None:
        """Count what is left to be counted. Nobody hears of it any more."""
        self._begun = None
        for choice, stamps in self._stamps.items():
            self._gather(choice, stamps)

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return self.num_gaps + sum(map(len, self._stamps.values()))

    def num_of(self, choice: int) -> int:
        """Tokens of one choice."""
        return self._gathered.get(choice, 0) + len(self._stamps.get(choice, ()))

    @property
    def mean_s(self) -> float | None:
        """Of all gaps; None: there is none."""
        return self._sum_s / self.num_gaps if self.num_gaps else None

    def _first(self, choice: int, now: float) -> None:
        self._stamps[choice] = array("d", (now,))
        if self.first_at is None:
            self.first_at = now
            # Whoever hears it knows this pace: a circle, which only the garbage collector would find.
            begun, self._begun = self._begun, None
            if begun is not None:
                begun(now)

    def _gather(self, choice: int, stamps: array[float]) -> None:
        """The last one stays, as the next gap's beginning."""
        if len(stamps) < 2:
            return
        gaps = sorted(map(sub, islice(stamps, 1, None), stamps))
        longest = gaps[-1]
        self.gaps.record_sorted(gaps)
        self.num_gaps += len(gaps)
        self._gathered[choice] = self._gathered.get(choice, 0) + len(gaps)
        self._sum_s += stamps[-1] - stamps[0]
        self.longest_s = max(self.longest_s, longest)
        if longest > self._late_s:
            self.num_late += len(gaps) - bisect_right(gaps, self._late_s)
        del stamps[:-1]
