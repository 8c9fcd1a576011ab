"""Define the priority lanes of requests."""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    """Priority of a request: a lower lane is served before all higher ones, at the gateway and at a worker."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """Return the lower-case name, as written by clients, files and metrics."""
        return self.name.lower()
