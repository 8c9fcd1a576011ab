"""A line on a terminal that says how far something long has come; says nothing where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tandem.core.clock import Clock

WIDTH, EVERY_S = 24, 0.1


class Bar:
    """Used in a `with`, whose end clears the line. `count` is None where the end is not known."""

    def __init__(self, clock: Clock, count: int | None) -> None:
        self._clock = clock
        self._count = count
        self._next_s = 0.0
        self._is_watched = sys.stderr.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_watched:
            self._write("")

    def update(self, done: int, text: Callable[[], str]) -> None:
        """`text` is called only when the line is written, ten times per second at most."""
        if not self._is_watched or self._clock.now() < self._next_s:
            return
        self._next_s = self._clock.now() + EVERY_S
        if self._count:
            filled = min(WIDTH, WIDTH * done // self._count)
            self._write(f"  [{'#' * filled}{'.' * (WIDTH - filled)}] {done:,} of {self._count:,}  {text()}")
        else:
            self._write(f"  {done:,}  {text()}")

    def _write(self, line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)  # noqa: T201 - what this file is for
