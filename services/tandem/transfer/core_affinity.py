"""Keeps one thread off the core that another one is on; never ties a thread to a core.

A kernel that copies for a reader is not interrupted, and where cores are few the scheduler often queues a thread that
is woken on the core of the one that woke it: a helper would then wait for the very copy that it should overlap with
(measured on two cores: a third to a half of all digests).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


class CoreAvoidance:
    """For the thread that calls `keep`. Does nothing where the system cannot, or where only one core may be used."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._current_core: Callable[[], int] | None = getattr(libc, "sched_getcpu", None)
        self._avoided = -1

    def keep(self, thread: int) -> None:
        """Let another thread of this process, by its native id, run on any core that we may use but this one."""
        if self._current_core is None or not hasattr(os, "sched_setaffinity"):
            return
        core = self._current_core()
        if core == self._avoided:
            return
        others = os.sched_getaffinity(0) - {core}
        if others:
            try:
                os.sched_setaffinity(thread, others)
            except OSError:
                return
            self._avoided = core
