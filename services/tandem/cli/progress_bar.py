"""Show the progress of a long run on standard error: one changing line on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tandem.core.clock import Clock

WIDTH, EVERY_S, EVERY_LOGGED_S = 24, 0.1, 30.0


class ProgressBar:
    """Context manager that shows the progress of a long run on standard error, and clears its line at the end.

    `count`: number of steps of the run; None if it is unknown. `unit`: word for the steps that are done, shown if
    `count` is None. If standard error is not a terminal, a line is written every `EVERY_LOGGED_S` seconds, so a short
    run writes nothing."""

    def __init__(self, clock: Clock, count: int | None, unit: str = "steps") -> None:
        self._clock = clock
        self._unit = unit
        self._count = count
        self._is_watched = sys.stderr.isatty()
        self._every_s = EVERY_S if self._is_watched else EVERY_LOGGED_S
        self._next_s = 0.0 if self._is_watched else clock.now() + EVERY_LOGGED_S

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_watched:
            self._write("")

    def update(self, done: int, text: Callable[[], str]) -> None:
        """Show that `done` steps are done, followed by the text that `text()` returns.

        Does nothing, without calling `text`, if the last line was shown less than `EVERY_S` seconds ago
        (`EVERY_LOGGED_S` if standard error is not a terminal)."""
        if self._clock.now() < self._next_s:
            return
        self._next_s = self._clock.now() + self._every_s
        if self._count:
            filled = min(WIDTH, WIDTH * done // self._count)
            self._write(f"  [{'#' * filled}{'.' * (WIDTH - filled)}] {done:,} of {self._count:,}  {text()}")
        else:
            self._write(f"  {done:,} {self._unit}  {text()}")

    def _write(self, line: str) -> None:
        if self._is_watched:
            line = f"\r\x1b[K{line}"
        print(line, end="" if self._is_watched else "\n", file=sys.stderr, flush=True)  # noqa: T201 - the progress line
