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
    """Own the open reads and the throughput of each source. May be called from any thread."""

    def __init__(self) -> None:
        self._open: dict[int, WorkerRef] = {}
        self._throughput: dict[WorkerRef, SourceThroughput] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<reads of {len(self._throughput)} sources, {len(self._open)} orders open>"

    def begin(self, order: int, source: WorkerRef) -> None:
        with self._lock:
            self._open[order] = source

    def is_open(self, source: WorkerRef) -> bool:
        """Return whether a read of the source is open."""
        with self._lock:
            return source in self._open.values()

    def end(self, order: int, num_bytes: int = 0, seconds: float = 0.0) -> WorkerRef:
        """End a read and return its source. A failed read, with 0 bytes, does not count."""
        with self._lock:
            source = self._open.pop(order)
            if num_bytes < MIN_SAMPLE_BYTES:
                return source
            before = self._throughput.get(source, SourceThroughput())
            self._throughput[source] = SourceThroughput(before.num_bytes + num_bytes, before.seconds + seconds)
            if len(self._throughput) > _MAX_SOURCES:
                del self._throughput[next(iter(self._throughput))]
            return source

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
