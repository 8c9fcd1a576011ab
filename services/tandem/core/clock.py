"""Read the time; the only file that does so, because code below the drivers takes time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of the time: `now` returns monotonic seconds from an arbitrary origin. Tests and the simulator pass their
    own."""

    def now(self) -> float: ...


class SystemClock:
    """Read the machine's monotonic clock."""

    now = staticmethod(time.monotonic)  # no wrapper function, because every token reads the clock


def wall_ns() -> int:
    """Return nanoseconds since the epoch; for identities and log stamps, not for durations."""
    return time.time_ns()
