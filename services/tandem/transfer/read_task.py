"""One read order on its way, part by part; never calls a transport and never reads time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.engine.ports import BlockCopy
from tandem.engine.transfer_messages import FailureKind, ReadDone, ReadFailed, ReadRequest

MAX_OPEN_PARTS = 2
"""Of one order: two keep a TCP peer busy between polls, and no more than two must drain after a cancel."""
LAST_PART_BYTES = 3 << 20
"""Or a little more. Its digest takes a tenth of a millisecond; so does the post of another part."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """`[start, stop)` of an order's copies, in the order in which they are read: what one post carries."""

    start: int
    stop: int


@dataclass(slots=True)
class ReadTask:
    """A part is waiting, then open under a handle, then being checked. Only the carrier moves it. `block_bytes` are
    read of each block.

    Copies are read by rising remote block, whatever their order in the prompt, so that neighbours can be merged: pools
    give blocks back last one first. Once failed, nothing is posted any more, but open parts and checks are waited for.
    """

    order: ReadRequest
    block_bytes: int
    started: float
    waiting: deque[ReadPart]
    open: dict[int, ReadPart] = field(default_factory=dict)
    num_checking: int = 0
    failure: tuple[FailureKind, str] | None = None
    _sequence: Sequence[int] = field(init=False)
    _copies: Sequence[BlockCopy] = field(init=False)

    def __post_init__(self) -> None:
        copies = self.order.copies
        self._sequence = sorted(range(len(copies)), key=[copy.remote for copy in copies].__getitem__)
        self._copies = [copies[place] for place in self._sequence]

    @property
    def may_post(self) -> bool:
        return bool(self.waiting) and len(self.open) < MAX_OPEN_PARTS

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.open or self.num_checking)

    def places(self, part: ReadPart) -> Sequence[int]:
        """Where a part's copies stand in the order."""
        return self._sequence[part.start : part.stop]

    def copies(self, part: ReadPart) -> Sequence[BlockCopy]:
        return self._copies[part.start : part.stop]

    def fail(self, kind: FailureKind, reason: str) -> None:
        """The first failure stands."""
        self.failure = self.failure or (kind, reason)
        self.waiting.clear()

    def report(self, now: float) -> ReadDone | ReadFailed:
        """Of a reading that is over."""
        if self.failure is None:
            return ReadDone(self.order.id, len(self.order.copies) * self.block_bytes, now - self.started)
        kind, reason = self.failure
        return ReadFailed(self.order.id, kind, reason, drained=True)


def split(order: ReadRequest, block_bytes: int, max_bytes: int) -> Iterator[ReadPart]:
    """Parts of at most `max_bytes`, at least one block of `block_bytes` each. Towards the end each takes two thirds of
    what is left, down to LAST_PART_BYTES, because the digest of what is read last delays the whole order."""
    most, last = (max(1, num_bytes // block_bytes) for num_bytes in (max_bytes, LAST_PART_BYTES))
    start, stop = 0, len(order.copies)
    while start < stop:
        left = stop - start
        num = min(most, left if 2 * left <= 3 * last else max(last, 2 * left // 3))
        yield ReadPart(start, start + num)
        start += num
