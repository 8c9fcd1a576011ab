"""Whose turn it is among requests that wait for one model: lane, then tenants by the tokens they got, then within one
tenant as its `TenantQueue` says; never sends one and never reads a clock.

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

from tandem.admission.queue_item import FlowKey, QueueItem
from tandem.admission.tenant_queue import TenantQueue
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane


class FairQueue:
    """`push`, `pop` and `remove` cost the logarithm of what waits, `first` too, spread over calls; `charge` is O(1)."""

    def __init__(self) -> None:
        self._flows: dict[FlowKey, TenantQueue] = {}
        self._active: dict[Lane, list[tuple[float, int, TenantQueue]]] = {lane: [] for lane in Lane}
        self._virtual = dict.fromkeys(Lane, 0.0)
        self._account_of: dict[RequestId, FlowKey] = {}
        self._served: dict[FlowKey, int] = {}
        self._num_pushed = 0
        self._num_stamps = 0

    def __len__(self) -> int:
        return len(self._account_of)

    def __contains__(self, key: RequestId) -> bool:
        return key in self._account_of

    # ---- requests come and go

    def push(self, key: RequestId, ticket: QueueItem) -> int:
        """Wait. Returns its number, for `put_back`."""
        flow = self._flow(ticket.account)
        if not flow.waiting:
            flow.counter = max(flow.counter, self._virtual[ticket.lane])
        self._num_pushed += 1
        self._enter(key, ticket, self._num_pushed)
        return self._num_pushed

    def put_back(self, key: RequestId, ticket: QueueItem, number: int, credit: int) -> None:
        """A request that was popped, which returned `credit`, is not served after all: it waits at its old place and
        its charge is taken back."""
        self._flow(ticket.account).give_back(credit)
        self.charge(ticket.account, -ticket.num_tokens)
        self._enter(key, ticket, number)

    def remove(self, key: RequestId) -> None:
        """It waits no longer; nothing when it does not wait."""
        account = self._account_of.pop(key, None)
        if account is not None:
            self._flows[account].remove(key)
            self._rank(self._flows[account])

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

    def pop(self, key: RequestId) -> int:
        """It is served now, and its tenant charged. Returns what `put_back` needs to undo it."""
        account = self._account_of.pop(key)
        flow = self._flows[account]
        num_tokens = flow.waiting[key].ticket.num_tokens
        self._virtual[account.lane] = max(self._virtual[account.lane], flow.counter)
        credit = flow.take(key)
        self._rank(flow)
        self.charge(account, num_tokens)
        return credit

    # ---- counters

    def charge(self, account: FlowKey, num_tokens: int) -> None:
        """It was served so many tokens here; negative ones were not, after all."""
        self._served[account] = self._served.get(account, 0) + num_tokens
        self.absorb(account, num_tokens)

    def served(self) -> Mapping[FlowKey, int]:
        """Tokens served here since the beginning, for other gateways."""
        return self._served

    def absorb(self, account: FlowKey, num_tokens: int) -> None:
        """Other gateways have served so many more."""
        flow = self._flow(account)
        flow.counter += num_tokens / flow.weight
        if num_tokens < 0:
            self._rank(flow)

    def counter(self, account: FlowKey) -> float:
        """Tokens / weight; only differences mean something."""
        return self._flow(account).counter

    # ---- what a newcomer must expect

    def num_ahead(self, ticket: QueueItem) -> int:
        """Tokens that are served before a request that comes now, if nothing else does. Costs a look at each tenant and
        at each size of its own."""
        mine = self._flows.get(ticket.account)
        counter = self._virtual[ticket.lane] if mine is None or not mine.waiting else mine.counter
        if mine is not None:
            counter = max(counter, mine.counter)
        own = 0 if mine is None else mine.num_ahead(ticket)
        end = counter + (own + ticket.num_tokens) / ticket.weight
        num_ahead = 0.0
        for flow in self._flows.values():
            if flow is mine:
                num_ahead += own
            elif flow.account.lane < ticket.lane:
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
        return flow.newest()

    def check(self) -> None:
        """Re-add the books. Raises AssertionError naming what is off."""
        for account, flow in self._flows.items():
            flow.check()
            assert all(self._account_of.get(key) == account for key in flow.waiting), f"{account}: requests"
        assert sum(len(flow.waiting) for flow in self._flows.values()) == len(self._account_of), "requests in no flow"

    def __repr__(self) -> str:
        waiting = sum(1 for flow in self._flows.values() if flow.waiting)
        return f"<fair queue {len(self)} requests of {waiting} tenants>"

    # ---- inside

    def _enter(self, key: RequestId, ticket: QueueItem, number: int) -> None:
        assert key not in self._account_of, f"{key} waits already"
        flow = self._flow(ticket.account)
        flow.enter(key, ticket, number)
        self._account_of[key] = ticket.account
        self._rank(flow)

    def _flow(self, account: FlowKey) -> TenantQueue:
        flow = self._flows.get(account)
        if flow is None:
            flow = self._flows[account] = TenantQueue(account)
        return flow

    def _rank(self, flow: TenantQueue) -> None:
        """Enter a flow anew under where its first request would end; its older entry is void."""
        self._num_stamps += 1
        flow.stamp = self._num_stamps
        key = flow.first()
        if key is not None:
            heapq.heappush(self._active[flow.account.lane], (flow.end(key), flow.stamp, flow))
