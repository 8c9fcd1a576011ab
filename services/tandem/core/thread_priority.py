"""Lower the priority of threads that compute beside an event loop or a decode loop."""

from __future__ import annotations

import os
import sys

_NICENESS = 5


def lower_priority() -> None:
    """Let the calling thread yield to the other threads of this process and its neighbours where cores are scarce; does
    nothing except on Linux, where priorities are those of threads."""
    if sys.platform == "linux":
        now = os.getpriority(os.PRIO_PROCESS, 0)  # 0 is the calling thread there
        os.setpriority(os.PRIO_PROCESS, 0, max(now, _NICENESS))  # less niceness would need a privilege
