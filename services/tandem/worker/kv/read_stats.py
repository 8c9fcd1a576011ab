"""How much reads for requests have brought from each source, and in what time; never judges it."""

from __future__ import annotations

import threading
from typing import NamedTuple

from tandem.core.ids import WorkerRef

TELLING_BYTES = 1 << 20
"""An order for less tells of its own cost, not of the way."""
_MAX_SOURCES = 4096


class SourceThroughput(NamedTuple):
    """`seconds` are those of orders: where two were under way at once they count twice."""

    num_bytes: int = 0
    seconds: float = 0.0


class ReadStats:
    """From any thread. Sources of which nobody takes the figures are forgotten, the oldest first."""

    def __init__(self) -> None:
        self._open: dict[int, WorkerRef] = {}
        self._brought: dict[WorkerRef, SourceThroughput] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<traffic of {len(self._brought)} sources, {len(self._open)} orders open>"

    def begin(self, order: int, source: WorkerRef) -> None:
        with self._lock:
            self._open[order] = source

    def is_open(self, source: WorkerRef) -> bool:
        """Whether an order to read it is under way."""
        with self._lock:
            return source in self._open.values()

    def end(self, order: int, num_bytes: int = 0, seconds: float = 0.0) -> WorkerRef:
        """Returns whom it was to read. Of a failed one nothing counts."""
        with self._lock:
            source = self._open.pop(order)
            if num_bytes < TELLING_BYTES:
                return source
            before = self._brought.get(source, SourceThroughput())
            self._brought[source] = SourceThroughput(before.num_bytes + num_bytes, before.seconds + seconds)
            if len(self._brought) > _MAX_SOURCES:
                del self._brought[next(iter(self._brought))]
            return source

    def take(self, num_bytes: int) -> dict[WorkerRef, SourceThroughput]:
        """Take out the sources that have brought at least so much since they were taken out last."""
        with self._lock:
            taken = {source: brought for source, brought in self._brought.items() if brought.num_bytes >= num_bytes}
            for source in taken:
                del self._brought[source]
        return taken
