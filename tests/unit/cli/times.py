"""A clock that a test sets by hand."""

from __future__ import annotations


class Hands:
    """Implement `Clock` with a time that the test sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time
