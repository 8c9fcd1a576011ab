"""Count how many bytes reads for requests transferred from each source, and in what time."""

from __future__ import annotations

import threading
from typing import NamedTuple

from tandem.core.ids import WorkerRef

MIN_SAMPLE_BYTES = 1 << 20
"""Smallest read that counts, in bytes; smaller ones measure the cost of an order, not the link."""
_MAX_SOURCES = 4096
"""Sources kept; beyond that the oldest is dropped."""


class SourceThroughput(NamedTuple):
    """Bytes read from a source, and the sum of the reads' durations: time in which two reads overlap counts twice."""

    num_bytes: int = 0
    seconds: float = 0.0


class ReadStats:
    """Own the throughput of each source. May be called from any thread."""

    def __init__(self) -> None:
        self._throughput: dict[WorkerRef, SourceThroughput] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<reads of {len(self._throughput)} sources>"

    def add(self, source: WorkerRef, num_bytes: int, seconds: float) -> None:
        """Count a read that has succeeded."""
        if num_bytes < MIN_SAMPLE_BYTES:
            return
        with self._lock:
            before = self._throughput.get(source, SourceThroughput())
            self._throughput[source] = SourceThroughput(before.num_bytes + num_bytes, before.seconds + seconds)
            if len(self._throughput) > _MAX_SOURCES:
                del self._throughput[next(iter(self._throughput))]

    def take(self, num_bytes: int) -> dict[WorkerRef, SourceThroughput]:
        """Remove and return the sources with at least `num_bytes` bytes since they were last returned."""
        with self._lock:
            taken = {
                source: throughput
                for source, throughput in self._throughput.items()
                if throughput.num_bytes >= num_bytes
            }
            for source in taken:
                del self._throughput[source]
        return taken
