"""Keep a helper thread off the CPU core of the thread that works beside it; the helper may use all other cores.

A `process_vm_readv` copy inside the kernel is not preempted, and on a machine with few cores the scheduler often queues
a woken thread on the core of the thread that woke it. The digest helper would then wait for the very copy that it
should overlap with (measured on two cores: a third to a half of all digests).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


class CoreAvoidance:
    """Keep a helper thread off the CPU core on which the calling thread runs.

    Does nothing where the system has no `sched_getcpu` or `sched_setaffinity`, or where only one core may be used.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._current_core: Callable[[], int] | None = getattr(libc, "sched_getcpu", None)
        self._avoided = -1

    def keep(self, thread: int) -> None:
        """Exclude the CPU core on which the caller runs now from the cores on which `thread` may run. `thread`: native
        thread id of a thread of this process.

        Does nothing if the caller still runs on the core that the last call has excluded. Does not raise.
        """
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
