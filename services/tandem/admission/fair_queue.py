"""Order the requests that wait for one model: by lane, then among tenants by tokens charged, then as each tenant's
`TenantQueue` decides.

Tenants share the workers fairly. As in the virtual token counter (Sheng et al., OSDI 2024) each tenant has a counter of
the tokens it was charged divided by its weight, charged with the prompt when a request is sent and with output as it is
sampled. Where KV time counts, a request whose KV time exceeds its tokens is charged with the KV time instead
(`admission.request_queue`). When a request arrives from a tenant without waiting requests, the tenant's counter is
raised to the counter that the tenant of the last sent request had before that request was sent. So the tenant loses the
capacity that it did not use earlier, but can catch up with what others were charged since then, for that request, for
output and for KV time. Next is the tenant whose first request would *end* soonest by the counters (counter + tokens /
weight; Demers et al., SIGCOMM 1989), not the one with the smallest counter as in the paper: between equal tenants the
short request goes first, and a long request that waits for capacity does not block tenants with small requests.

Bounds, inside a lane, with L the most tokens that one request is charged when it is sent, and F the most by which the
charges for one tenant's requests that workers have change until these requests end:

- Of two tenants that always have a waiting request, charged tokens / weight differ by at most 2 (L + 2 F) / (least
  weight). When the tenant that is ahead was last sent a request, it was ahead by at most L; since then the charges of
  neither tenant have widened the gap by more than F. The factor 2 stands for both ends of the time.
- F is the output, the KV time and the corrections that are not charged yet, which nobody knows in advance. The KV time
  in it is at most that of all KV memory for the longest time of a request.
- With G gateways that exchange counters every T seconds, each of which charges R tokens per second, and D seconds of
  delay, by at most G * R * (T + D) / (least weight) more: tokens that other gateways have charged and not reported yet.
  Gateways exchange the charges, so that KV time needs no exchange of its own.

Lanes are strict: a lane waits while a more urgent lane has waiting requests, without limit. The tenants' `lane` setting
decides which tenants may use which lanes, so starvation of a lane is a matter of configuration. Where lanes have
workers of their own, the caller skips lanes whose workers are full, so that they do not block those that have others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Set

from tandem.admission.tenant_queue import FlowKey, QueueItem, TenantQueue
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import ALL_LANES, Lane


class FairQueue:
    """Order the waiting requests of one model so that tenants share its workers fairly, by a counter of the tokens that
    each tenant was charged in each lane.

    `push`, `pop`, `remove` and (amortized) `first` take a time logarithmic in the number of waiting requests, plus the
    time to insert into or delete from two sorted lists of that length. `charge` takes constant time.
    """

    def __init__(self) -> None:
        self._flows: dict[FlowKey, TenantQueue] = {}
        self._active: dict[Lane, list[tuple[float, int, TenantQueue]]] = {lane: [] for lane in Lane}
        self._virtual = dict.fromkeys(Lane, 0.0)
        self._flow_key_of: dict[RequestId, FlowKey] = {}
        self._num_waiting: Counter[Lane] = Counter()
        self._served: dict[FlowKey, int] = {}
        self._num_pushed = 0
        self._num_stamps = 0

    def __len__(self) -> int:
        return len(self._flow_key_of)

    def num_waiting(self, lane: Lane) -> int:
        """Return the number of waiting requests of one lane."""
        return self._num_waiting[lane]

    # ---- requests

    def push(self, key: RequestId, item: QueueItem) -> int:
        """Add the waiting request `key`, which is ordered by `item`, and return its position number.

        A request that is pushed later gets a greater number; `put_back` needs the number. Raises AssertionError when
        `key` waits already.
        """
        flow = self._flow(item.flow_key)
        flow.weigh(item.weight)
        if not flow.waiting:
            flow.lift(self._virtual[item.flow_key.lane])
        self._num_pushed += 1
        self._enter(key, item, self._num_pushed)
        return self._num_pushed

    def put_back(self, key: RequestId, item: QueueItem, number: int, credit: int) -> None:
        """Put a popped request back at its old position in the queue, and undo the charge to its tenant.

        `item`: the request's properties now; its `num_tokens` tokens are subtracted from the tenant's counter.
        `number`: what `push` returned for the request. `credit`: what `pop` returned for it. Raises AssertionError when
        `key` waits already.
        """
        self._flow(item.flow_key).restore_credit(credit)
        self.charge(item.flow_key, -item.num_tokens)
        self._enter(key, item, number)

    def remove(self, key: RequestId) -> None:
        """Remove a waiting request without charging its tenant; does nothing when the request does not wait."""
        flow_key = self._flow_key_of.pop(key, None)
        if flow_key is not None:
            self._flows[flow_key].remove(key)
            self._num_waiting[flow_key.lane] -= 1
            self._rank(self._flows[flow_key])

    def first(self, skipped: Set[Lane] = frozenset()) -> RequestId | None:
        """Return the request to send next, without removing it. Requests of the lanes in `skipped` are left out; None
        when no other request waits."""
        for lane in Lane:
            if lane in skipped:
                continue
            heap = self._active[lane]
            while heap:
                end, stamp, flow = heap[0]
                key = flow.first()
                if stamp != flow.stamp or key is None:
                    heapq.heappop(heap)
                elif end < (now := flow.end(key)):  # charged since it was ranked
                    heapq.heapreplace(heap, (now, stamp, flow))
                else:
                    return key
        return None

    def pop(self, key: RequestId) -> int:
        """Remove a waiting request because it is sent now, and charge its tokens to its tenant.

        Returns a number that `put_back` needs as `credit` if the request has to wait again. Raises KeyError when the
        request does not wait.
        """
        flow_key = self._flow_key_of.pop(key)
        flow = self._flows[flow_key]
        num_tokens = flow.waiting[key].item.num_tokens
        self._virtual[flow_key.lane] = max(self._virtual[flow_key.lane], flow.counter)
        credit = flow.take(key)
        self._num_waiting[flow_key.lane] -= 1
        self._rank(flow)
        self.charge(flow_key, num_tokens)
        return credit

    # ---- counters

    def charge(self, flow_key: FlowKey, num_tokens: int) -> None:
        """Add `num_tokens` tokens, which this gateway charges, to the counter of the tenant and lane `flow_key`, and to
        `served`; a negative number undoes a charge."""
        self._served[flow_key] = self._served.get(flow_key, 0) + num_tokens
        self.add_to_counter(flow_key, num_tokens)

    def served(self) -> Mapping[FlowKey, int]:
        """Return the tokens that this gateway has charged since it started, by tenant and lane; gateways report them to
        each other."""
        return self._served

    def add_to_counter(self, flow_key: FlowKey, num_tokens: int) -> None:
        """Add `num_tokens` tokens, which another gateway has charged, to the counter of the tenant and lane `flow_key`;
        `served` does not include them."""
        flow = self._flow(flow_key)
        flow.counter += num_tokens / flow.weight
        if num_tokens < 0:
            self._rank(flow)

    def services_of_waiting(self) -> Mapping[FlowKey, float]:
        """Return, for each tenant and lane with waiting requests, the tokens that all gateways have charged so far,
        divided by the tenant's weight."""
        return {flow_key: flow.counter - flow.lifted for flow_key, flow in self._flows.items() if flow.waiting}

    # ---- prediction and overflow

    def num_ahead(self, item: QueueItem, rivals: Set[Lane] = ALL_LANES) -> int:
        """Return the number of prompt tokens in the waiting requests that would be sent before a new request `item`, if
        no other request arrived.

        `rivals`: lanes whose requests wait for the same workers as `item`; requests of more urgent lanes count only if
        their lane is one of these. The time of a call grows with the number of tenants, and with the number of
        different prompt lengths, rounded as in `TenantQueue.num_ahead`, among the requests of the new request's tenant.
        """
        own_flow, lane = self._flows.get(item.flow_key), item.flow_key.lane
        counter = self._virtual[lane] if own_flow is None or not own_flow.waiting else own_flow.counter
        if own_flow is not None:
            counter = max(counter, own_flow.counter_with(item.weight))
        num_own_ahead = 0 if own_flow is None else own_flow.num_ahead(item)
        end = counter + (num_own_ahead + item.num_tokens) / item.weight
        num_ahead = 0.0
        for flow in self._flows.values():
            if flow is own_flow:
                num_ahead += num_own_ahead
            elif flow.flow_key.lane < lane and flow.flow_key.lane in rivals:
                num_ahead += flow.num_tokens
            elif flow.flow_key.lane is lane:
                num_ahead += min(flow.num_tokens, max(0.0, (end - flow.counter) * flow.weight))
        return int(num_ahead)

    def fullest(self) -> RequestId | None:
        """Return the request to drop when too many wait; None when none waits.

        The request is taken from the tenant with the most waiting requests divided by its weight; of equal tenants,
        from the last by name. It is the newest of this tenant's requests in its least urgent lane and, in that lane,
        with the least urgent priority.
        """
        flows = [flow for flow in self._flows.values() if flow.waiting]
        if not flows:
            return None
        totals: dict[TenantId, float] = {}
        for flow in flows:
            tenant = flow.flow_key.tenant
            totals[tenant] = totals.get(tenant, 0.0) + len(flow.waiting) / flow.weight
        worst = max(totals, key=lambda tenant: (totals[tenant], tenant))
        flow = max(
            (candidate for candidate in flows if candidate.flow_key.tenant == worst),
            key=lambda candidate: candidate.flow_key.lane,
        )
        return flow.newest()

    def check(self) -> None:
        """Raise AssertionError if a stored count or sum differs from a recount over the waiting requests; for tests."""
        for flow_key, flow in self._flows.items():
            flow.check()
            assert all(self._flow_key_of.get(key) == flow_key for key in flow.waiting), f"{flow_key}: requests"
        assert sum(len(flow.waiting) for flow in self._flows.values()) == len(self._flow_key_of), "requests in no flow"
        waiting = Counter(flow_key.lane for flow_key in self._flow_key_of.values())
        assert waiting == self._num_waiting, f"{self!r} miscounts its lanes"

    def __repr__(self) -> str:
        waiting = sum(1 for flow in self._flows.values() if flow.waiting)
        return f"<fair queue {len(self)} requests of {waiting} tenants>"

    # ---- ranking

    def _enter(self, key: RequestId, item: QueueItem, number: int) -> None:
        assert key not in self._flow_key_of, f"{key} waits already"
        flow = self._flow(item.flow_key)
        flow.enter(key, item, number)
        self._flow_key_of[key] = item.flow_key
        self._num_waiting[item.flow_key.lane] += 1
        self._rank(flow)

    def _flow(self, flow_key: FlowKey) -> TenantQueue:
        flow = self._flows.get(flow_key)
        if flow is None:
            flow = self._flows[flow_key] = TenantQueue(flow_key)
        return flow

    def _rank(self, flow: TenantQueue) -> None:
        """Rank a flow by where its first request would end; its older heap entry becomes void."""
        self._num_stamps += 1
        flow.stamp = self._num_stamps
        key = flow.first()
        if key is not None:
            heapq.heappush(self._active[flow.flow_key.lane], (flow.end(key), flow.stamp, flow))
