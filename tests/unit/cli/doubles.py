"""A clock that a test sets by hand, and a terminal that keeps what is written to it."""

from __future__ import annotations

from io import StringIO


class Hands:
    """Implement `Clock` with a time that the test sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True
