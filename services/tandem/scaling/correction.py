"""By how much a model of workers was too hopeful, learned from what came too late; never knows the model."""

from __future__ import annotations

import math

MOST = 2.0
STEP = 1.15
FADE = 0.95


class Correction:
    """A factor from 1 to `MOST` on the work. Counts of `span_s` are judged at a time: it rises where more was late than
    is tolerated and chance would have it, though there were as many workers as the model asked for, and fades slowly
    where it was not."""

    def __init__(self, span_s: float, tolerated: float) -> None:
        self._span_s = span_s
        self._tolerated = tolerated
        self._began: float | None = None
        self._num_late = self._num_all = 0
        self.factor = 1.0

    def add(self, at: float, num_late: int, num_all: int, *, had_enough: bool) -> None:
        """Counts up to `at`. With too few workers they say nothing of the model."""
        if self._began is None or not had_enough:
            self._began = at
            self._num_late = self._num_all = 0
            return
        self._num_late, self._num_all = self._num_late + num_late, self._num_all + num_all
        if at - self._began >= self._span_s:
            self._judge()
            self._began = at
            self._num_late = self._num_all = 0

    def _judge(self) -> None:
        expected = self._tolerated * self._num_all
        if self._num_late > expected + 2 * math.sqrt(expected) + 1:
            self.factor = min(MOST, self.factor * STEP)
        else:
            self.factor = 1 + FADE * (self.factor - 1)

    def __repr__(self) -> str:
        return f"<correction {self.factor:.2f}>"
