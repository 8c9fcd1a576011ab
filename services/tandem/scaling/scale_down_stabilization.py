"""Delay scale-down until fewer workers have been enough for a while."""

from __future__ import annotations

from collections import deque


class StabilizationWindow:
    """The needs of one role over the last `hold_s`. The result grows at once and shrinks to the highest need of the
    window, and only after observations of that length without a gap; so under an oscillating need it stays at the
    highest."""

    def __init__(self, hold_s: float, gap_s: float) -> None:
        self._hold_s = hold_s
        self._gap_s = gap_s
        self._since: float | None = None
        self._last = 0.0
        self._highest: deque[tuple[float, int]] = deque()
        """(time, need) with falling needs: each the highest from its time on."""

    def add(self, at: float, number: int) -> None:
        if self._since is None or at - self._last > self._gap_s:
            self._since = at
            self._highest.clear()
        self._last = at
        while self._highest and self._highest[-1][1] <= number:
            self._highest.pop()
        self._highest.append((at, number))
        while self._highest[0][0] < at - self._hold_s:
            self._highest.popleft()

    def settled(self, current: int) -> int:
        """Return the number of workers to have, after the last `add`, when there are `current` now."""
        if self._since is None:
            return current
        if self._last - self._since < self._hold_s:
            return max(current, self._highest[-1][1])
        return self._highest[0][1] if self._highest[0][1] < current else max(current, self._highest[-1][1])

    def __repr__(self) -> str:
        return f"<steady {self._highest[0][1] if self._highest else 'unknown'} for {self._hold_s:g} s>"
