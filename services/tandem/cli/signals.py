"""What SIGINT and SIGTERM do to `tandem serve`; never ends anything itself."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A start was stopped. Not KeyboardInterrupt itself: where that passes through code that a C extension runs, as the
    import of torch does, `python -m` ends by SIGINT, although somebody caught it."""


class StopSignals:
    """`has_come` after the first signal. One that comes during the start also raises Stopped there, because most of a
    start is waiting inside libraries that know nothing of it."""

    def __init__(self) -> None:
        self.has_come = False
        # A handler interrupts whatever the main thread is at, another call of itself included, and this is what may be
        # told in the middle of anything: an Event's lock may be held by the very code that was interrupted.
        self._come: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_starting = False

    def wait(self, timeout_s: float) -> bool:
        """Whether a signal has come by then."""
        if not self.has_come:
            with suppress(queue.Empty):
                self._come.get(timeout=timeout_s)
        return self.has_come

    def listen(self) -> None:
        """Take the signals, again if need be: libraries put handlers of their own in place."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def starting(self) -> Iterator[None]:
        self._is_starting = True
        self.listen()
        try:
            yield
        finally:
            self._is_starting = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.has_come = True
        self._come.put(number)
        if self._is_starting:
            self._is_starting = False  # the way out is not interrupted a second time
            raise Stopped
