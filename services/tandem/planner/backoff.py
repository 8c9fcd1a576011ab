"""Compute how long to wait after consecutive failures."""

from __future__ import annotations

from collections.abc import Callable

MAX_RETRY_AFTER_S = 60.0
"""Longest delay requested by a server (Retry-After) that is respected."""


class Backoff:
    """Delays that double from `first_s` to `most_s`.

    `random` returns numbers in [0, 1); up to half of a delay is taken off at random, so that clients that failed
    together do not retry together.
    """

    def __init__(self, random: Callable[[], float], first_s: float = 0.2, most_s: float = 10.0) -> None:
        self._random = random
        self._first_s = first_s
        self._most_s = most_s
        self.num_failures = 0

    def worked(self) -> None:
        self.num_failures = 0

    def failed(self, retry_after_s: float | None = None) -> float:
        """Return the seconds until the next try, at least `retry_after_s` within MAX_RETRY_AFTER_S."""
        delay_s = min(self._most_s, self._first_s * 2.0**self.num_failures)
        self.num_failures = min(self.num_failures + 1, 64)
        return max(delay_s * (1 - self._random() / 2), min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))
