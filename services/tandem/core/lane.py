"""The lanes that requests travel in, in their order; never decides who may use which."""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    """A lower lane is served before all higher ones, at the gateway and at a worker."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """As clients, files and metrics write it."""
        return self.name.lower()
