"""Learn by which factor a capacity model finds too few workers, from the fraction of late requests."""

from __future__ import annotations

import math

MOST = 2.0
STEP = 1.15
FADE = 0.95
HELPS = 0.8
"""A step has helped when the late fraction fell to at most this part of the earlier one."""
REST_SPANS = 10


class Correction:
    """Learn the factor by which to multiply a role's demand, because the role's capacity model finds too few workers.

    `factor`: the current value, from 1 to MOST. `span_s`: seconds over which late requests are counted before the
    factor is adjusted. `tolerated`: the fraction of requests (or of gaps between tokens) that may be late.

    - After a span, the factor is multiplied by STEP if more were late than tolerated and than chance explains, although
      as many workers were serving as the model found necessary. It decays slowly towards 1 if no more were late.
    - If a rise did not reduce the late fraction to at most HELPS times the earlier one, the rise is undone, and the
      factor does not rise in the next REST_SPANS spans in which too many are late: some lateness does not depend on the
      number of workers.
    """

    def __init__(self, span_s: float, tolerated: float) -> None:
        self._span_s = span_s
        self._tolerated = tolerated
        self._began: float | None = None
        self._num_late = 0
        self._num_all = 0
        self._share_before: float | None = None
        self._num_rests = 0
        self.factor = 1.0

    def add(self, at: float, num_late: int, num_all: int, *, had_enough: bool) -> None:
        """Add what was counted since the last call, up to the time `at`: `num_late` of `num_all` requests or gaps were
        late.

        `had_enough`: whether at least as many workers were serving as the model found necessary. If not, the counts of
        the current span are discarded and a new span begins, because too few workers explain the lateness. The counts
        of the first call are discarded as well.
        """
        if self._began is None or not had_enough:
            self._begin(at)
            return
        self._num_late = self._num_late + num_late
        self._num_all = self._num_all + num_all
        if at - self._began >= self._span_s:
            self._evaluate()
            self._begin(at)

    def _begin(self, at: float) -> None:
        self._began = at
        self._num_late = 0
        self._num_all = 0

    def _evaluate(self) -> None:
        expected = self._tolerated * self._num_all
        if self._num_late <= expected + 2 * math.sqrt(expected) + 1:
            self.factor = 1 + FADE * (self.factor - 1)
            self._share_before = None
        elif self._num_rests:
            self._num_rests -= 1
        else:
            self._step(self._num_late / max(1, self._num_all))

    def _step(self, share: float) -> None:
        if self._share_before is not None and share > HELPS * self._share_before:
            self.factor = max(1.0, self.factor / STEP)
            self._share_before = None
            self._num_rests = REST_SPANS
        else:
            self.factor = min(MOST, self.factor * STEP)
            self._share_before = share
