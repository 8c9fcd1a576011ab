"""What SIGINT and SIGTERM do to `tandem serve`; never ends anything itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A start was stopped. Not KeyboardInterrupt itself: where that passes through code that a C extension runs, as the
    import of torch does, `python -m` ends by SIGINT, although somebody caught it."""


class StopSignals:
    """`event` is set by the first signal. One that comes during the start also raises Stopped there, because most of a
    start is waiting inside libraries that know no event."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._is_starting = False

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

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.event.set()
        if self._is_starting:
            self._is_starting = False  # the way out is not interrupted a second time
            raise Stopped
