"""Define the clock and read the machine's time; code that decides takes the time as an argument.

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
    """Read the machine's monotonic clock."""

    now = staticmethod(time.monotonic)  # no wrapper function, because every token reads the clock


def wall_ns() -> int:
    """Return nanoseconds since the epoch; for identities and log stamps, not for durations."""
    return time.time_ns()
