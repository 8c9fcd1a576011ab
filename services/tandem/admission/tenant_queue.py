"""One tenant's requests that wait in one lane, and which of them is next; never compares tenants.

Priorities are strict. Among equals it is the rule by which a worker divides its steps (`sched.share`), said of what is
sent: half of the tokens go to the oldest request, half to the shortest. Each token that is sent with the shortest, past
an older one, is credit of the oldest; when that covers the oldest's own tokens, the oldest is next and spends it.

Bound, with L the most tokens of a request: one of n tokens behind m tokens of older ones is next after at most
2 m + n + L tokens of its priority are sent, whatever arrives later; and after 2 s + L where s are the tokens of those
not longer than it, later ones included.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.admission.queue_item import FlowKey, QueueItem
from tandem.core.ids import RequestId

_SIZE_BITS = 4
"""Of a number of tokens that tell its size: sizes are a sixteenth to an eighth apart."""
_SPARE = 64
"""Entries of requests that are gone, beyond as many as wait, before a heap is built anew."""


class _Place(NamedTuple):
    """The less is first; `size` is 0 where age alone decides."""

    priority: int
    size: int
    number: int


class _Size(NamedTuple):
    priority: int
    size: int


@dataclass(slots=True)
class _QueuedRequest:
    ticket: QueueItem
    number: int


@dataclass(eq=False, slots=True)
class TenantQueue:
    """`counter` is in tokens / weight, `credit` in tokens; the caller keeps `counter` and `stamp`, and nothing else."""

    account: FlowKey
    weight: float = 1.0
    counter: float = 0.0
    num_tokens: int = 0
    credit: int = 0
    stamp: int = 0
    waiting: dict[RequestId, _QueuedRequest] = field(default_factory=dict)
    _by_age: list[tuple[_Place, RequestId]] = field(default_factory=list)
    _by_size: list[tuple[_Place, RequestId]] = field(default_factory=list)
    _sizes: Counter[_Size] = field(default_factory=Counter)

    def enter(self, key: RequestId, ticket: QueueItem, number: int) -> None:
        """`number` is its age: the less is older."""
        self.weight = ticket.weight
        self.waiting[key] = _QueuedRequest(ticket, number)
        self.num_tokens += ticket.num_tokens
        self._sizes[_size(ticket)] += ticket.num_tokens
        heapq.heappush(self._by_age, (_age(self.waiting[key]), key))
        heapq.heappush(self._by_size, (_shortness(self.waiting[key]), key))
        if len(self._by_age) > 2 * len(self.waiting) + _SPARE:
            self._by_age = self._heap(_age)
        if len(self._by_size) > 2 * len(self.waiting) + _SPARE:
            self._by_size = self._heap(_shortness)

    def first(self) -> RequestId | None:
        """Who is next; None when nobody waits."""
        oldest = self._oldest()
        if oldest is None or self.credit >= self.waiting[oldest].ticket.num_tokens:
            return oldest
        return self._shortest()

    def take(self, key: RequestId) -> int:
        """One that waits is sent. Returns the credit that this gave the oldest, or took from it, for `give_back`."""
        before, oldest = self.credit, self._oldest()
        num_tokens = self.waiting[key].ticket.num_tokens
        if key != oldest:
            self.credit += num_tokens
        elif key != self._shortest():
            self.credit = max(0, self.credit - num_tokens)
        self.remove(key)
        return self.credit - before

    def give_back(self, credit: int) -> None:
        """What was taken comes back: so does its credit."""
        self.credit = max(0, self.credit - credit)

    def remove(self, key: RequestId) -> None:
        """It waits no longer."""
        ticket = self.waiting.pop(key).ticket
        self.num_tokens -= ticket.num_tokens
        size = _size(ticket)
        self._sizes[size] -= ticket.num_tokens
        if not self._sizes[size]:
            del self._sizes[size]
        if not self.waiting:
            self.credit = 0

    def end(self, key: RequestId) -> float:
        """Where the counter would be after one of its requests."""
        return self.counter + self.waiting[key].ticket.num_tokens / self.weight

    def num_ahead(self, ticket: QueueItem) -> int:
        """Tokens that are sent before one that comes now, if nothing else does, by sizes: those not longer, and of the
        longer ones what is sent for their age meanwhile. Costs a look at each size and priority."""
        mine = _size(ticket)
        not_longer = sum(tokens for size, tokens in self._sizes.items() if size <= mine)
        longer = sum(tokens for size, tokens in self._sizes.items() if size.priority == mine.priority and size > mine)
        return not_longer + min(longer, not_longer + self.credit)

    def newest(self) -> RequestId:
        """The last one to be sent by age; somebody must wait."""
        return max(self.waiting, key=lambda key: _age(self.waiting[key]))

    def check(self) -> None:
        """Re-add the books. Raises AssertionError naming what is off."""
        sizes: Counter[_Size] = Counter()
        for waiter in self.waiting.values():
            sizes[_size(waiter.ticket)] += waiter.ticket.num_tokens
        assert self.num_tokens == sum(sizes.values()), f"{self.account}: tokens"
        assert self._sizes == sizes, f"{self.account}: sizes"
        assert self.credit >= 0 and (self.waiting or not self.credit), f"{self.account}: credit {self.credit}"
        for heap in (self._by_age, self._by_size):
            assert self.waiting.keys() <= {key for _, key in heap}, f"{self.account}: a heap lacks one that waits"

    # ---- inside

    def _oldest(self) -> RequestId | None:
        return self._top(self._by_age)

    def _shortest(self) -> RequestId | None:
        return self._top(self._by_size)

    def _top(self, heap: list[tuple[_Place, RequestId]]) -> RequestId | None:
        """Those that are gone are dropped here and not where they go."""
        while heap:
            place, key = heap[0]
            waiter = self.waiting.get(key)
            if waiter is not None and waiter.number == place.number:
                return key
            heapq.heappop(heap)
        return None

    def _heap(self, place: Callable[[_QueuedRequest], _Place]) -> list[tuple[_Place, RequestId]]:
        found = [(place(waiter), key) for key, waiter in self.waiting.items()]
        heapq.heapify(found)
        return found


def _age(waiter: _QueuedRequest) -> _Place:
    return _Place(waiter.ticket.priority, 0, waiter.number)


def _shortness(waiter: _QueuedRequest) -> _Place:
    return _Place(waiter.ticket.priority, waiter.ticket.num_tokens, waiter.number)


def _size(ticket: QueueItem) -> _Size:
    shift = max(0, ticket.num_tokens.bit_length() - _SIZE_BITS)
    return _Size(ticket.priority, ticket.num_tokens >> shift << shift)
