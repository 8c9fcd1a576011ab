"""How long to wait after failures in a row; pure, and never waits."""

from __future__ import annotations

from collections.abc import Callable

MOST_ASKED_S = 60.0
"""A server that asks for more is asked again sooner."""


class Backoff:
    """Doubles from `first_s` to `most_s`, of which `draw`, in [0, 1), takes off up to a half, so that many who failed
    together do not come back together."""

    def __init__(self, draw: Callable[[], float], first_s: float = 0.2, most_s: float = 10.0) -> None:
        self._draw = draw
        self._first_s = first_s
        self._most_s = most_s
        self.num_failures = 0

    def worked(self) -> None:
        self.num_failures = 0

    def failed(self, retry_after_s: float | None = None) -> float:
        """Seconds until the next try, not fewer than the server asked for."""
        delay_s = min(self._most_s, self._first_s * 2.0**self.num_failures)
        self.num_failures = min(self.num_failures + 1, 64)
        return max(delay_s * (1 - self._draw() / 2), min(retry_after_s or 0.0, MOST_ASKED_S))
