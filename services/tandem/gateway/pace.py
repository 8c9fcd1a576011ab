"""When the tokens of one answer left, and the gaps between them; never holds one back."""

from __future__ import annotations

import math
from collections.abc import Callable

from tandem.obs.metrics import Buckets


class Pace:
    """On the clock that `now` reads. A gap is between two tokens of one choice; one that is longer than `late_s` is
    late, and 0 promises nothing. All gaps go into `gaps` too, and `begun` hears when the
    first token leaves."""

    __slots__ = (
        "_begun", "_firsts", "_lasts", "_late_s", "_now", "first_at", "gaps", "longest_s", "num_gaps", "num_late",
    )  # fmt: skip

    def __init__(self, now: Callable[[], float], gaps: Buckets, late_s: float, begun: Callable[[float], None]) -> None:
        self.first_at: float | None = None
        self.longest_s = 0.0
        self.num_gaps = 0
        self.num_late = 0
        self._now = now
        self.gaps = gaps
        self._begun = begun
        self._late_s = late_s or math.inf
        self._firsts: dict[int, float] = {}
        self._lasts: dict[int, float] = {}

    def left(self, choice: int) -> None:
        """Called for every token of every stream."""
        now, lasts = self._now(), self._lasts
        if choice in lasts:
            gap = now - lasts[choice]
            self.gaps.record(gap)
            self.num_gaps += 1
            if gap > self.longest_s:
                self.longest_s = gap
            if gap > self._late_s:
                self.num_late += 1
        else:
            self._firsts[choice] = now
            if self.first_at is None:
                self.first_at = now
                self._begun(now)
        lasts[choice] = now

    @property
    def mean_s(self) -> float | None:
        """Of all gaps; None: there is none."""
        if not self.num_gaps:
            return None
        return (sum(self._lasts.values()) - sum(self._firsts.values())) / self.num_gaps
