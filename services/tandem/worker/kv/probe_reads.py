"""Track the reads that the engine does not know, by the ids of their orders.

The ids lie above all ids of the engine, so that both kinds of orders go through one transfer.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import count

from tandem.core.ids import WorkerRef
from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import ReadDone, ReadFailed
from tandem.transfer.interface import PeerError

_FIRST_ID = 1 << 62
"""First id of these orders."""


class ProbeReads:
    """Own a future for each open probe read. A future completes only with the end of its order: with ReadDone, or
    PeerError.

    All probe reads write the same blocks, and a failed one may go on writing until its source is `drained`.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[WorkerRef, Future[ReadDone]]] = {}
        self._undrained: set[WorkerRef] = set()
        self._ids = count(_FIRST_ID)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{len(self._open)} probe reads>"

    def begin(self, trial: StartRead) -> tuple[StartRead, Future[ReadDone]]:
        """Create an order under an id of its own, and its future. The caller calls `refuse` if it cannot start the
        order."""
        future: Future[ReadDone] = Future()
        future.set_running_or_notify_cancel()
        order = replace(trial, read=next(self._ids))
        with self._lock:
            self._open[order.read] = order.source, future
        return order, future

    def refuse(self, order: StartRead, reason: str) -> None:
        """Fail an order that was not started."""
        _, future = self._take(order.read)
        future.set_exception(PeerError(reason))

    def end(self, event: ReadDone | ReadFailed) -> bool:
        """Complete the future of an ended order; returns False for an order of the engine."""
        if event.id < _FIRST_ID:
            return False
        source, future = self._take(event.id)
        if isinstance(event, ReadDone):
            future.set_result(event)
            return True
        if not event.drained:
            with self._lock:
                self._undrained.add(source)
        future.set_exception(PeerError(event.reason))
        return True

    def is_open(self, source: WorkerRef) -> bool:
        with self._lock:
            return any(read == source for read, _ in self._open.values())

    def drained(self, source: WorkerRef) -> None:
        """Record that no read of this source can still be running."""
        with self._lock:
            self._undrained.discard(source)

    def undrained(self) -> WorkerRef | None:
        """Return a source of which an abandoned read may still be running."""
        with self._lock:
            return next(iter(self._undrained), None)

    def _take(self, id: int) -> tuple[WorkerRef, Future[ReadDone]]:
        with self._lock:
            return self._open.pop(id)
