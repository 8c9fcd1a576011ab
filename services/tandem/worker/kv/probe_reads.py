"""Reads of which the engine knows nothing, by the number of their orders; never sends one.

Numbers lie above all that the engine gives, so that both kinds of orders go through one mover.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

from tandem.core.ids import WorkerRef
from tandem.engine.ports import BlockCopy, PeerError, TransportPeer
from tandem.engine.transfer_messages import ReadDone, ReadFailed, ReadRequest

_FIRST_ID = 1 << 62


class ProbeRead(NamedTuple):
    """What a trial read copies and how that is checked, see `ReadRequest`."""

    copies: tuple[BlockCopy, ...]
    logical: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...] | None


class ProbeReads:
    """A future for each open one, which nothing ends but its order: with ReadDone, or PeerError where that failed.
    All write the same blocks, and one that failed may go on writing them until its source is `drained`."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[WorkerRef, Future[ReadDone]]] = {}
        self._undrained: set[WorkerRef] = set()
        self._ids = count(_FIRST_ID)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{len(self._open)} trial reads>"

    def begin(self, peer: TransportPeer, trial: ProbeRead) -> tuple[ReadRequest, Future[ReadDone]]:
        """An order to send. Whoever cannot send it says `refuse`."""
        future: Future[ReadDone] = Future()
        future.set_running_or_notify_cancel()
        order = ReadRequest(next(self._ids), peer, trial.copies, trial.logical, trial.digests)
        with self._lock:
            self._open[order.id] = peer.worker, future
        return order, future

    def refuse(self, order: ReadRequest, reason: str) -> None:
        _, future = self._take(order.id)
        future.set_exception(PeerError(reason))

    def end(self, event: ReadDone | ReadFailed) -> bool:
        """Whether it was an order of ours that has ended."""
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
        """It is proven that no read of this source goes on."""
        with self._lock:
            self._undrained.discard(source)

    def undrained(self) -> WorkerRef | None:
        """A source of which a read may go on that was given up."""
        with self._lock:
            return next(iter(self._undrained), None)

    def _take(self, id: int) -> tuple[WorkerRef, Future[ReadDone]]:
        with self._lock:
            return self._open.pop(id)
