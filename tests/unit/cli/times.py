"""A clock that a test turns by hand; never reads time."""

from __future__ import annotations


class Hands:
    """A `Clock`."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time
