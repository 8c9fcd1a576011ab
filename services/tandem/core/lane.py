"""Define the priority lanes of requests."""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    """Priority class of a request: at gateway and worker, requests of a lower number are served before all of higher
    ones."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """Return the lower-case name, as written by clients, files and metrics."""
        return self.name.lower()
