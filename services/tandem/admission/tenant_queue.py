"""Order the waiting requests of one tenant in one lane.

Priorities are strict. Requests of equal priority follow the rule by which a worker divides its steps
(`sched.prefill_sharing`), applied to sent tokens: half of the tokens go to the oldest request, half to the shortest.
The tokens of each request that is sent ahead of an older one are credited to the oldest request; when its credit covers
its own tokens, it is next and spends the credit.

Bounds, where L is the most tokens of a request: a request of n tokens, behind older ones of m tokens in total, is next
after at most 2 m + n + L tokens of its priority are sent, whatever arrives later. It is also next after at most 2 s + L
tokens, where s is the total of all requests that are not longer, including those that arrive later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane

_SIZE_BITS = 4
"""Significant bits of a token count that define its size class: classes are a sixteenth to an eighth apart."""


class FlowKey(NamedTuple):
    """Key of a tenant's queue and of its fairness counter: one tenant in one lane."""

    lane: Lane
    tenant: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueItem:
    """Hold the properties of a request by which queues order it.

    `flow_key`: its tenant and lane. `num_tokens`: tokens that the tenant is charged when the request is sent. `weight`:
    the tenant's share of the lane, relative to the weights of other tenants. `priority`: the rank among the tenant's
    own requests; a request with a lower number is sent first.
    """

    flow_key: FlowKey
    num_tokens: int
    weight: float = 1.0
    priority: int = 0


class _ByAge(NamedTuple):
    priority: int
    number: int
    key: RequestId


class _BySize(NamedTuple):
    priority: int
    num_tokens: int
    number: int
    key: RequestId


class _Size(NamedTuple):
    priority: int
    size: int


class _QueuedRequest(NamedTuple):
    item: QueueItem
    number: int


@dataclass(eq=False, slots=True)
class TenantQueue:
    """Choose which waiting request of one tenant in one lane is sent next, by priority, age and length.

    `weight`: the tenant's share relative to other tenants; 1 until `is_weighted`. `num_tokens`: tokens of all waiting
    requests, which `waiting` holds by id. `credit`: tokens sent ahead of the oldest request; once they reach its own
    tokens, it is sent next. `lifted`: by how much `lift` has raised `counter` in total. `counter` (tokens charged /
    weight, plus `lifted`) and `stamp` (number of the newest entry in the heap of tenants) are maintained by
    `FairQueue`. `_by_age` and `_by_size` are sorted lists: to insert into or delete from ten thousand entries takes a
    few microseconds.
    """

    flow_key: FlowKey
    weight: float = 1.0
    is_weighted: bool = False
    counter: float = 0.0
    lifted: float = 0.0
    num_tokens: int = 0
    credit: int = 0
    stamp: int = 0
    waiting: dict[RequestId, _QueuedRequest] = field(default_factory=dict)
    _by_age: list[_ByAge] = field(default_factory=list)
    _by_size: list[_BySize] = field(default_factory=list)
    _sizes: Counter[_Size] = field(default_factory=Counter)

    def counter_with(self, weight: float) -> float:
        """Return the tenant's counter for its `weight`. The weight is unknown before the tenant's first request here;
        until then `counter` holds the tokens that other gateways have charged, not divided by it."""
        return self.counter if self.is_weighted else self.counter / weight

    def weigh(self, weight: float) -> None:
        """Set the weight of the tenant whose request arrives."""
        self.counter = self.counter_with(weight)
        self.weight = weight
        self.is_weighted = True

    def lift(self, counter: float) -> None:
        """Raise the tenant's counter to `counter`, because the tenant had no waiting request; do nothing when it is as
        high already."""
        if self.counter < counter:
            self.lifted += counter - self.counter
            self.counter = counter

    def enter(self, key: RequestId, item: QueueItem, number: int) -> None:
        """Add the waiting request `key`, which is ordered by `item`. `number`: its age; a smaller number is older."""
        self.weight = item.weight
        self.waiting[key] = _QueuedRequest(item, number)
        self.num_tokens += item.num_tokens
        self._sizes[_size(item)] += item.num_tokens
        insort(self._by_age, _ByAge(item.priority, number, key))
        insort(self._by_size, _BySize(item.priority, item.num_tokens, number, key))

    def first(self) -> RequestId | None:
        """Return the request to send next, without removing it; None when none waits."""
        if not self.waiting:
            return None
        oldest = self._by_age[0].key
        return oldest if self.credit >= self.waiting[oldest].item.num_tokens else self._by_size[0].key

    def take(self, key: RequestId) -> int:
        """Remove a waiting request because it is sent, and return by how much this has changed `credit`, the tokens
        sent ahead of the oldest request.

        Pass the result to `restore_credit` if the request has to wait again. Raises KeyError when the request does not
        wait.
        """
        before = self.credit
        num_tokens = self.waiting[key].item.num_tokens
        if key != self._by_age[0].key:
            self.credit += num_tokens
        elif key != self._by_size[0].key:
            self.credit = max(0, self.credit - num_tokens)
        self.remove(key)
        return self.credit - before

    def restore_credit(self, credit: int) -> None:
        """Undo the change of `credit` (tokens sent ahead of the oldest request) by `take`, because the request will
        wait again.

        `credit`: what `take` returned for the request.
        """
        self.credit = max(0, self.credit - credit)

    def remove(self, key: RequestId) -> None:
        """Remove a waiting request that is not sent; `credit` changes only if no other request waits.

        Raises KeyError when the request does not wait.
        """
        item, number = self.waiting.pop(key)
        del self._by_age[bisect_left(self._by_age, _ByAge(item.priority, number, key))]
        del self._by_size[bisect_left(self._by_size, _BySize(item.priority, item.num_tokens, number, key))]
        self.num_tokens -= item.num_tokens
        size = _size(item)
        self._sizes[size] -= item.num_tokens
        if not self._sizes[size]:
            del self._sizes[size]
        if not self.waiting:
            self.credit = 0

    def end(self, key: RequestId) -> float:
        """Return the tenant's weighted tokens (`counter`) as they would be once the waiting request `key` was sent to
        workers.

        Raises KeyError when the request does not wait.
        """
        return self.counter + self.waiting[key].item.num_tokens / self.weight

    def num_ahead(self, item: QueueItem) -> int:
        """Return an estimate of the tokens in the waiting requests that would be sent before a new request `item`, if
        no other arrived.

        The estimate is the sum of three parts: all requests of more urgent priority; the requests of the same priority
        that are not longer; and as many tokens of the longer ones of the same priority as may be sent meanwhile because
        they are older. Lengths are compared after rounding down to four significant bits, so that requests of nearly
        equal length count as equal.

        The estimate is too low by at most the length of the longest request. It is up to twice too high where shorter
        requests are older than all longer ones, because each shorter one is counted as if it gave an older, longer one
        as many tokens of credit.
        """
        own_size = _size(item)
        not_longer = sum(tokens for size, tokens in self._sizes.items() if size <= own_size)
        longer = sum(
            tokens for size, tokens in self._sizes.items() if size.priority == own_size.priority and size > own_size
        )
        return not_longer + min(longer, not_longer + self.credit)

    def newest(self) -> RequestId:
        """Return the newest of the waiting requests with the least urgent priority. Raises IndexError when none
        waits."""
        return self._by_age[-1].key

    def check(self) -> None:
        """Raise AssertionError if a stored count or sum differs from a recount over the waiting requests; for tests."""
        sizes: Counter[_Size] = Counter()
        for queued in self.waiting.values():
            sizes[_size(queued.item)] += queued.item.num_tokens
        assert self.num_tokens == sum(sizes.values()), f"{self.flow_key}: tokens"
        assert self._sizes == sizes, f"{self.flow_key}: sizes"
        assert self.credit >= 0 and (self.waiting or not self.credit), f"{self.flow_key}: credit {self.credit}"
        ages = sorted(_ByAge(item.priority, number, key) for key, (item, number) in self.waiting.items())
        assert self._by_age == ages, f"{self.flow_key}: order by age"
        shorter = sorted(_BySize(age.priority, self.waiting[age.key].item.num_tokens, *age[1:]) for age in ages)
        assert self._by_size == shorter, f"{self.flow_key}: order by size"


def _size(item: QueueItem) -> _Size:
    shift = max(0, item.num_tokens.bit_length() - _SIZE_BITS)
    return _Size(item.priority, item.num_tokens >> shift << shift)
