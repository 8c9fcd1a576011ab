"""Reads of which the engine knows nothing, by the number of their orders; never sends one.

Numbers lie above all that the engine gives, so that both kinds of orders go through one mover.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import count
from typing import NamedTuple

from tandem.engine.orders import ReadDone, ReadFailed, ReadOrder
from tandem.engine.ports import BlockCopy, PeerError, TransportPeer

_FIRST_ID = 1 << 62


class Trial(NamedTuple):
    """What a trial read copies and how that is checked, see `ReadOrder`."""

    copies: tuple[BlockCopy, ...]
    logical: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...] | None


class TrialReads:
    """A future for each open one, which nothing ends but its order: with ReadDone, or PeerError where that failed."""

    def __init__(self) -> None:
        self._open: dict[int, Future[ReadDone]] = {}
        self._ids = count(_FIRST_ID)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{len(self._open)} trial reads>"

    def begin(self, peer: TransportPeer, trial: Trial) -> tuple[ReadOrder, Future[ReadDone]]:
        """An order to send. Whoever cannot send it says `refuse`."""
        future: Future[ReadDone] = Future()
        future.set_running_or_notify_cancel()
        order = ReadOrder(next(self._ids), peer, trial.copies, trial.logical, trial.digests)
        with self._lock:
            self._open[order.id] = future
        return order, future

    def refuse(self, order: ReadOrder, reason: str) -> None:
        self._take(order.id).set_exception(PeerError(reason))

    def end(self, event: ReadDone | ReadFailed) -> bool:
        """Whether it was an order of ours that has ended."""
        if event.id < _FIRST_ID:
            return False
        future = self._take(event.id)
        if isinstance(event, ReadDone):
            future.set_result(event)
        else:
            future.set_exception(PeerError(event.reason))
        return True

    def _take(self, id: int) -> Future[ReadDone]:
        with self._lock:
            return self._open.pop(id)
