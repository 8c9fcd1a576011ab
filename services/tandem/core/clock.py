"""Define the clock that programs read. Code that makes decisions takes the time as an argument instead.

Tests and the simulator can therefore replace the clock.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time: `now` returns seconds from an arbitrary origin.

    Tests and the simulator pass clocks of their own.
    """

    def now(self) -> float: ...


class SystemClock:
    """Clock that returns the machine's monotonic time."""

    now = staticmethod(time.monotonic)  # no wrapper function, because every token reads the clock


def wall_ns() -> int:
    """Return the wall-clock time in nanoseconds since the Unix epoch, for identities and time stamps in logs. It is not
    for durations, because the wall clock may be adjusted."""
    return time.time_ns()
