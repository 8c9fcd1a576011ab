"""Handle SIGINT and SIGTERM of `tandem serve`."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal has interrupted the start.

    This is a subclass because of `python -m`: if KeyboardInterrupt itself passes through code that a C extension runs,
    as in the import of torch, the interpreter exits by SIGINT even though the exception was caught.
    """


class StopSignals:
    """Record the first signal, and interrupt a start with `Stopped`.

    A start must be interrupted because it mostly waits inside libraries that know nothing of the signal. `has_received`
    is true from the first signal on.
    """

    def __init__(self) -> None:
        self.has_received = False
        # A handler may interrupt the main thread anywhere, even in another call of the handler. SimpleQueue.put is
        # reentrant; an Event is not: the interrupted code may hold its lock.
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_starting = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal for at most `timeout_s`; returns whether one has been received."""
        if not self.has_received:
            with suppress(queue.Empty):
                self._received.get(timeout=timeout_s)
        return self.has_received

    def listen(self) -> None:
        """Install the signal handlers. Call this again after starting libraries that install their own."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Install the handlers and raise Stopped in the block at the first signal."""
        self._is_starting = True
        self.listen()
        try:
            yield
        finally:
            self._is_starting = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.has_received = True
        self._received.put(number)
        if self._is_starting:
            self._is_starting = False  # do not interrupt the cleanup by a second signal
            raise Stopped
