"""Run the rest of a program in a session of its own, as a child of the process that the user started.

A signal to the whole process group (Ctrl-C in a terminal, a supervisor's SIGTERM) would also reach the processes that
libraries start, and end them before they can drain. With a separate session it reaches only the parent, which forwards
it to the child alone.
"""

from __future__ import annotations

import os
import signal
import sys

from tandem.stores.redis_supervisor import die_with

_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def enter_own_session() -> int | None:
    """Fork, and let the child continue in a new session while the parent waits for it and forwards signals.

    Returns None in the child. In the parent it blocks until the child has ended and returns its exit code, 128 plus the
    signal's number if a signal ended it. The child is killed when its parent ends. To be called before any thread is
    started."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with(parent, signal.SIGKILL)()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    for number in _FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Wait without reaping: the signal handler must not send to a reaped child, whose id another process may have.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code
