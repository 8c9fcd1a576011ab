"""The only file that reads time; below the drivers time is an argument, never read."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary origin, never going back."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)  # no call around the call: it is read for every token


def wall_ns() -> int:
    """Nanoseconds since the epoch; for identities and log stamps, never for durations."""
    return time.time_ns()
