"""Keep sequences sorted by service order: lane, priority, arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tandem.sched.state.sequence import Order, Sequence


class OrderedQueue:
    """Sorted list of sequences. A preempted sequence returns to its old position, ahead of all that arrived after
    it."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        insort(self._items, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._items, seq.order, key=_order)
        assert index < len(self._items) and self._items[index] is seq, f"{seq!r} is not queued"
        del self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __contains__(self, seq: object) -> bool:
        return any(item is seq for item in self._items)


def _order(seq: Sequence) -> Order:
    return seq.order
