"""One read order on its way, part by part; never calls a transport and never reads time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.engine.ports import BlockCopy
from tandem.transfer.orders import FailureKind, ReadDone, ReadFailed, ReadOrder

MAX_OPEN_PARTS = 2
"""Of one order: two keep a TCP peer busy between polls, and no more than two must drain after a cancel."""


@dataclass(frozen=True, slots=True)
class Part:
    """`[start, stop)` of an order's copies: what one post carries."""

    start: int
    stop: int


@dataclass(slots=True)
class Reading:
    """A part is waiting, then open under a handle, then arrived, then checked. Only the carrier moves it.

    Once failed, nothing is posted or checked any more, but open parts are still waited for.
    """

    order: ReadOrder
    started: float
    waiting: deque[Part]
    open: dict[int, Part] = field(default_factory=dict)
    arrived: deque[Part] = field(default_factory=deque)
    failure: tuple[FailureKind, str] | None = None

    @property
    def may_post(self) -> bool:
        return bool(self.waiting) and len(self.open) < MAX_OPEN_PARTS

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.open or self.arrived)

    def copies(self, part: Part) -> tuple[BlockCopy, ...]:
        return self.order.copies[part.start : part.stop]

    def fail(self, kind: FailureKind, reason: str) -> None:
        """The first failure stands."""
        self.failure = self.failure or (kind, reason)
        self.waiting.clear()
        self.arrived.clear()

    def report(self, now: float) -> ReadDone | ReadFailed:
        """Of a reading that is over."""
        if self.failure is None:
            return ReadDone(self.order.id, self.order.num_bytes, now - self.started)
        kind, reason = self.failure
        return ReadFailed(self.order.id, kind, reason, drained=True)


def split(order: ReadOrder, max_bytes: int) -> Iterator[Part]:
    """Parts of at most `max_bytes`, at least one block each, of nearly equal size."""
    num = len(order.copies)
    most = max(1, max_bytes // order.peer.layout.block_bytes)
    num_parts = -(-num // most)
    for index in range(num_parts):
        yield Part(index * num // num_parts, (index + 1) * num // num_parts)
