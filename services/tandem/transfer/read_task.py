"""Track one read, part by part, from the first post to its report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import FailureKind, ReadDone, ReadFailed, TransportPeer
from tandem.transfer.interface import BlockCopy

MAX_OPEN_PARTS = 2
"""Most open parts of one read: two keep a TCP peer busy between polls, and only two must drain after a cancel."""
LAST_PART_BYTES = 3 << 20
"""Approximate size of the last part, in bytes.

Its digest takes a tenth of a millisecond, as long as the post of another part.
"""


@dataclass(slots=True, eq=False)
class ReadPart:
    """The copies `[start, stop)` of a read, in reading order, that one post carries.

    `wrong`: index in the read of the first block whose digest differs, set when the part was checked; None: all match.
    `defect`: the exception that the digest function raised instead.
    """

    start: int
    stop: int
    wrong: int | None = None
    defect: Exception | None = None


@dataclass(slots=True)
class ReadTask:
    """Own the parts of one read of `peer`: waiting, open under a handle of the transport, or being checked.

    Only the transfer engine changes a task. `block_bytes` are read of each block. Copies are read by rising remote
    block, whatever their order in the prompt, so that adjacent blocks can be merged: pools hand out freed blocks last
    one first. After a failure no part is posted any more, but open parts and checks are awaited.
    """

    read: StartRead
    peer: TransportPeer
    block_bytes: int
    started: float
    waiting: deque[ReadPart]
    open: dict[int, ReadPart] = field(default_factory=dict)
    num_checking: int = 0
    failure: tuple[FailureKind, str] | None = None
    _sequence: Sequence[int] = field(init=False)
    _copies: Sequence[BlockCopy] = field(init=False)

    def __post_init__(self) -> None:
        remote, local = [offered.block for offered in self.read.offered], self.read.local
        self._sequence = sorted(range(len(remote)), key=remote.__getitem__)
        self._copies = [BlockCopy(remote[place], local[place]) for place in self._sequence]

    @property
    def may_post(self) -> bool:
        return bool(self.waiting) and len(self.open) < MAX_OPEN_PARTS

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.open or self.num_checking)

    def places(self, part: ReadPart) -> Sequence[int]:
        """Return the indices of a part's copies in the read."""
        return self._sequence[part.start : part.stop]

    def copies(self, part: ReadPart) -> Sequence[BlockCopy]:
        return self._copies[part.start : part.stop]

    def fail(self, kind: FailureKind, reason: str) -> None:
        """Record a failure and drop the waiting parts. An earlier failure is kept."""
        self.failure = self.failure or (kind, reason)
        self.waiting.clear()

    def report(self, now: float) -> ReadDone | ReadFailed:
        """Return the final event of a task that is over."""
        if self.failure is None:
            return ReadDone(self.read.read, len(self.read.local) * self.block_bytes, now - self.started)
        kind, reason = self.failure
        return ReadFailed(self.read.read, kind, reason, drained=True)


def split(num_blocks: int, block_bytes: int, max_bytes: int) -> Iterator[ReadPart]:
    """Yield the parts of a read of `num_blocks` blocks, of at most `max_bytes` each, and of at least one block of
    `block_bytes`.

    Towards the end each part takes two thirds of the rest, down to LAST_PART_BYTES, because the digest of the last
    part delays the whole read.
    """
    most, last = (max(1, num_bytes // block_bytes) for num_bytes in (max_bytes, LAST_PART_BYTES))
    start = 0
    while start < num_blocks:
        left = num_blocks - start
        num = min(most, left if 2 * left <= 3 * last else max(last, 2 * left // 3))
        yield ReadPart(start, start + num)
        start += num
