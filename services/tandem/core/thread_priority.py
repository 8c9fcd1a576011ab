"""Lower the priority of threads that compute beside an event loop or a decode loop."""

from __future__ import annotations

import os
import sys

_NICENESS = 5


def lower_priority() -> None:
    """Lower the priority of the calling thread, so that other threads of this process and of the machine run first
    where cores are scarce.

    Does nothing except on Linux, where each thread has a priority of its own.
    """
    if sys.platform == "linux":
        now = os.getpriority(os.PRIO_PROCESS, 0)  # 0 is the calling thread there
        os.setpriority(os.PRIO_PROCESS, 0, max(now, _NICENESS))  # less niceness would need a privilege
