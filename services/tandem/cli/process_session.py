"""Puts a program into a session of its own, below the process that a user started; never knows what it does there.

A signal to the whole process group of that process (Ctrl-C in a terminal, a supervisor's SIGTERM) would also reach what
libraries start, and end it before it can drain. Here it reaches one process, which passes it on to one other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def enter_own_session() -> int | None:
    """Fork. None in the child, which goes on and is killed when its parent is; the parent stays here until the child
    has ended, and gets its exit code. To be called before there is any thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with(parent, signal.SIGKILL)()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Not waitpid: a child that is collected already must not be sent a signal, since its id may be another's.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def die_with(parent: int, number: signal.Signals) -> Callable[[], None]:
    """What a child of `parent` runs to get a signal when that ends. It is tied to the parent's thread that forked,
    which must be its main thread."""
    prctl = ctypes.CDLL(None).prctl

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return arm
