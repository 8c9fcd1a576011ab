"""Whose turn it is among requests that wait for one model: lane, then tenants by the tokens they got, then priority and
arrival; never sends one and never reads a clock.

Fair queueing over tenants in tokens. As in the virtual token counter (Sheng et al., OSDI 2024) each tenant has a
counter of what it was served divided by its weight, charged with the prompt when a request is sent and with output as
it comes, and one that comes back from having had nothing to wait is lifted to the others' present: what it did not use
is gone. Next is the tenant whose first request would *end* soonest by the counters (counter + tokens / weight; Demers
et al., SIGCOMM 1989), not the one with the least counter as there: between equals the short request goes first, and a
long one that has to wait for room does not hold up who asks for little.

Bounds, inside a lane, with L the most tokens that one request is charged:

- Of two tenants that always have something to wait, served tokens / weight differ by at most 2 L / (least weight).
- With G gateways that exchange counters every T seconds, each of which serves R tokens per second, and D seconds of
  delay, by at most G * R * (T + D) / (least weight) more: what the others have served and this one has not heard of.

Lanes are strict: a lane waits while a more urgent one does, for ever if that never ends. Who may use which is the
tenants' `lane`, so a starving lane is somebody's decision.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane


class Account(NamedTuple):
    """What counters are kept by."""

    lane: Lane
    tenant: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What the queue needs to know of a request: `num_tokens` that it is charged when it is sent."""

    lane: Lane
    tenant: TenantId
    num_tokens: int
    weight: float = 1.0
    priority: int = 0

    @property
    def account(self) -> Account:
        return Account(self.lane, self.tenant)


class _Place(NamedTuple):
    """In a flow; the less is first."""

    priority: int
    number: int


@dataclass(eq=False, slots=True)
class _Flow:
    """One tenant in one lane. `counter` is in tokens / weight. `stamp` is that of its newest entry among the flows."""

    account: Account
    weight: float = 1.0
    counter: float = 0.0
    num_tokens: int = 0
    waiting: dict[RequestId, tuple[_Place, Ticket]] = field(default_factory=dict)
    heap: list[tuple[_Place, RequestId]] = field(default_factory=list)
    stamp: int = 0

    def first(self) -> RequestId | None:
        while self.heap:
            place, key = self.heap[0]
            held = self.waiting.get(key)
            if held is not None and held[0] == place:
                return key
            heapq.heappop(self.heap)
        return None

    def end(self, key: RequestId) -> float:
        """Where the counter would be after one of its requests."""
        return self.counter + self.waiting[key][1].num_tokens / self.weight


class FairQueue:
    """`push`, `pop` and `remove` cost the logarithm of what waits, `first` too, spread over calls; `charge` is O(1)."""

    def __init__(self) -> None:
        self._flows: dict[Account, _Flow] = {}
        self._active: dict[Lane, list[tuple[float, int, _Flow]]] = {lane: [] for lane in Lane}
        self._virtual = dict.fromkeys(Lane, 0.0)
        self._account_of: dict[RequestId, Account] = {}
        self._served: dict[Account, int] = {}
        self._num_pushed = 0
        self._num_stamps = 0

    def __len__(self) -> int:
        return len(self._account_of)

    def __contains__(self, key: RequestId) -> bool:
        return key in self._account_of

    # ---- requests come and go

    def push(self, key: RequestId, ticket: Ticket) -> int:
        """Wait, behind all of the tenant's that are as urgent. Returns its number, for `put_back`."""
        flow = self._flow(ticket.account)
        if not flow.waiting:
            flow.counter = max(flow.counter, self._virtual[ticket.lane])
        self._num_pushed += 1
        self._enter(key, ticket, self._num_pushed)
        return self._num_pushed

    def put_back(self, key: RequestId, ticket: Ticket, number: int) -> None:
        """A request that was popped is not served after all: it waits at its old place and its charge is taken back."""
        self.charge(ticket.account, -ticket.num_tokens)
        self._enter(key, ticket, number)

    def remove(self, key: RequestId) -> None:
        """It waits no longer; nothing when it does not wait."""
        account = self._account_of.pop(key, None)
        if account is not None:
            flow = self._flows[account]
            _, ticket = flow.waiting.pop(key)
            flow.num_tokens -= ticket.num_tokens
            self._rank(flow)

    def first(self) -> RequestId | None:
        """Whose turn it is; None when nobody waits."""
        for lane in Lane:
            heap = self._active[lane]
            while heap:
                end, stamp, flow = heap[0]
                key = flow.first()
                if stamp != flow.stamp or key is None:
                    heapq.heappop(heap)
                elif end < (now := flow.end(key)):  # it was charged since
                    heapq.heapreplace(heap, (now, stamp, flow))
                else:
                    return key
        return None

    def pop(self, key: RequestId) -> None:
        """It is served now, and its tenant charged."""
        account = self._account_of[key]
        flow = self._flows[account]
        _, ticket = flow.waiting[key]
        self._virtual[account.lane] = max(self._virtual[account.lane], flow.counter)
        self.remove(key)
        self.charge(account, ticket.num_tokens)

    # ---- counters

    def charge(self, account: Account, num_tokens: int) -> None:
        """It was served so many tokens here; negative ones were not, after all."""
        self._served[account] = self._served.get(account, 0) + num_tokens
        self.absorb(account, num_tokens)

    def served(self) -> Mapping[Account, int]:
        """Tokens served here since the beginning, for other gateways."""
        return self._served

    def absorb(self, account: Account, num_tokens: int) -> None:
        """Other gateways have served so many more."""
        flow = self._flow(account)
        flow.counter += num_tokens / flow.weight
        if num_tokens < 0:
            self._rank(flow)

    def counter(self, account: Account) -> float:
        """Tokens / weight; only differences mean something."""
        return self._flow(account).counter

    # ---- what a newcomer must expect

    def num_ahead(self, ticket: Ticket) -> int:
        """Tokens that are served before a request that comes now, if nothing else does. Costs a look at each tenant."""
        mine = self._flows.get(ticket.account)
        counter = self._virtual[ticket.lane] if mine is None or not mine.waiting else mine.counter
        if mine is not None:
            counter = max(counter, mine.counter)
        own = 0 if mine is None else mine.num_tokens
        end = counter + (own + ticket.num_tokens) / ticket.weight
        num_ahead = 0.0
        for flow in self._flows.values():
            if flow is mine or flow.account.lane < ticket.lane:
                num_ahead += flow.num_tokens
            elif flow.account.lane is ticket.lane:
                num_ahead += min(flow.num_tokens, max(0.0, (end - flow.counter) * flow.weight))
        return int(num_ahead)

    def fullest(self) -> RequestId | None:
        """The newest request of whoever has most of them waiting, by its weight, least urgent lane first: who is to go
        when all cannot stay. Of equals the tenant that comes last by name."""
        flows = [flow for flow in self._flows.values() if flow.waiting]
        if not flows:
            return None
        totals: dict[TenantId, float] = {}
        for flow in flows:
            tenant = flow.account.tenant
            totals[tenant] = totals.get(tenant, 0.0) + len(flow.waiting) / flow.weight
        worst = max(totals, key=lambda tenant: (totals[tenant], tenant))
        flow = max((f for f in flows if f.account.tenant == worst), key=lambda f: f.account.lane)
        return max(flow.waiting, key=lambda key: flow.waiting[key][0])

    def check(self) -> None:
        """Re-add the books. Raises AssertionError naming what is off."""
        for account, flow in self._flows.items():
            assert flow.num_tokens == sum(t.num_tokens for _, t in flow.waiting.values()), f"{account}: tokens"
            assert all(self._account_of.get(key) == account for key in flow.waiting), f"{account}: requests"
        assert sum(len(flow.waiting) for flow in self._flows.values()) == len(self._account_of), "requests in no flow"

    def __repr__(self) -> str:
        waiting = sum(1 for flow in self._flows.values() if flow.waiting)
        return f"<fair queue {len(self)} requests of {waiting} tenants>"

    # ---- inside

    def _enter(self, key: RequestId, ticket: Ticket, number: int) -> None:
        assert key not in self._account_of, f"{key} waits already"
        flow = self._flow(ticket.account)
        flow.weight = ticket.weight
        place = _Place(ticket.priority, number)
        flow.waiting[key] = (place, ticket)
        flow.num_tokens += ticket.num_tokens
        heapq.heappush(flow.heap, (place, key))
        self._account_of[key] = ticket.account
        self._rank(flow)

    def _flow(self, account: Account) -> _Flow:
        flow = self._flows.get(account)
        if flow is None:
            flow = self._flows[account] = _Flow(account)
        return flow

    def _rank(self, flow: _Flow) -> None:
        """Enter a flow anew under where its first request would end; its older entry is void."""
        self._num_stamps += 1
        flow.stamp = self._num_stamps
        key = flow.first()
        if key is not None:
            heapq.heappush(self._active[flow.account.lane], (flow.end(key), flow.stamp, flow))
