"""Notice when the engine's loop makes no progress, from the iterations and steps that the loop reports."""

from __future__ import annotations

from collections import deque

from tandem.core.clock import Clock

STALL_FACTOR = 20
"""A step counts as stalled when it takes this many times longer than the longest recent one."""
NUM_RECENT = 64
"""Steps from which the longest recent one is taken."""


class Watchdog:
    """Notice when the engine's loop makes no progress.

    The loop reports its iterations and steps; any other thread may call `stalled`. `stall_s`: a time without progress
    counts as a stall only if it is longer than this many seconds.
    """

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._last_beat = clock.now()
        self._step_began: float | None = None
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._longest_s = 0.0

    def beat(self) -> None:
        """Record that the engine's loop begins another iteration."""
        self._last_beat = self._clock.now()

    def step_begins(self) -> None:
        now = self._clock.now()
        self._step_began = now
        self._last_beat = now

    def step_ends(self) -> None:
        assert self._step_began is not None, "a step ends that never began"
        self._last_beat = self._clock.now()
        self._recent.append(self._last_beat - self._step_began)
        self._longest_s = max(self._recent)
        self._step_began = None

    def stalled(self) -> str | None:
        """Return a text that names what hangs and for how long; None while the engine's loop makes progress.

        The loop hangs if it has made no progress for more than `stall_s` seconds, and also for more than `STALL_FACTOR`
        times the duration of the longest recent step.
        """
        silent_s = self._clock.now() - self._last_beat
        if silent_s <= max(self._stall_s, STALL_FACTOR * self._longest_s):
            return None
        what = "the engine's loop" if self._step_began is None else "a step"
        return f"{what} has made no progress for {silent_s:.1f} s (longest recent step {self._longest_s:.3f} s)"
