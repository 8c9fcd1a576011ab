"""Show on standard error how far a long task is."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tandem.core.clock import Clock, SystemClock

Progress = Callable[[str], None]
_CLOCK = SystemClock()


class ProgressLine:
    """Progress display on standard error: call it with each new text, and `close` it at the end.

    On a terminal the line is rewritten in place. Elsewhere a text is printed only if its first word, the stage, differs
    from the previous text's first word."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_terminal = sys.stderr.isatty()
        self._last = ""

    def __call__(self, text: str) -> None:
        stage = text.split(" ", 1)[0]
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{self._title}: {text}")
        elif stage != self._last:
            sys.stderr.write(f"{self._title}: {text}\n")
        self._last = stage
        sys.stderr.flush()

    def close(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")


class ByteProgress:
    """Reports how many of `total_bytes` are done, and at what rate: call it with the number of bytes of each finished
    part.

    `stage`: first word of each text. `progress`: function that is called with each text."""

    def __init__(self, stage: str, total_bytes: int, progress: Progress, clock: Clock = _CLOCK) -> None:
        self._stage, self._total, self._progress, self._clock = stage, max(1, total_bytes), progress, clock
        self._done = 0
        self._begin_s = clock.now()

    def __call__(self, num_bytes: int) -> None:
        # Weights may become larger or smaller than they are stored.
        self._done = min(self._total, self._done + num_bytes)
        percent = 100 * self._done // self._total
        rate = self._done / max(self._clock.now() - self._begin_s, 1e-3)
        bar = "#" * (percent // 5) + "." * (20 - percent // 5)
        amounts = f"{self._done >> 20} of {self._total >> 20} MiB, {rate / 2**20:.0f} MiB/s"
        self._progress(f"{self._stage} [{bar}] {amounts}")
