"""Order the requests of one gateway that wait for workers, with a fair queue for each model, and charge their tenants.

A request uses two resources: the workers' computation, by tokens, and their KV memory, by KV time. KV time is the
integral over the request's time at workers of its prompt and output tokens; `gateway.kv_time_tokens` converts it to
tokens. The charge for a request is the larger of the two, its dominant resource, as for a packet in memoryless DRFQ
(Ghodsi et al., SIGCOMM 2012). The sum of both would be asset fairness, with which a tenant may get less than it would
get alone from its weighted part of the cluster (Ghodsi et al., NSDI 2011). The maximum is taken for each request and
not for each tenant: otherwise a tenant that has used much KV could then compute as many tokens without a charge, while
others wait. So a tenant that sends some requests that dominate in tokens, and others that dominate in KV time, is
charged up to twice its dominant share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.admission.fair_queue import FairQueue
from tandem.admission.fairness_window import PERIOD_S, FairnessWindow
from tandem.admission.tenant_queue import FlowKey, QueueItem
from tandem.core.ids import RequestId
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.request import Request

LEARNING = 0.1
"""Weight of the last request in the moving average of a tenant's uncached prompt fraction."""


class ModelFlow(NamedTuple):
    """Key of the token counts that gateways report to each other: one model, and one tenant in one lane."""

    model: str
    flow_key: FlowKey


@dataclass(slots=True)
class _QueueEntry:
    """State of one request.

    `num_expected`: prompt tokens that were expected to be computed when it arrived. `num_computed`: prompt tokens that
    are charged as computed; 0 while it waits. `num_output`: sampled tokens. `num_kv`: its KV time, converted to tokens
    by `gateway.kv_time_tokens`. `num_charged`: all that its tenant is charged for it.
    """

    queue: FairQueue
    item: QueueItem
    flow_key: FlowKey
    number: int
    num_prompt: int
    num_expected: int
    num_computed: int = 0
    num_output: int = 0
    num_kv: float = 0.0
    num_charged: int = 0
    is_sent: bool = False
    credit: int = 0

    @property
    def num_due(self) -> int:
        """Return the tokens to charge for the request: its computed plus its sampled tokens, or its KV time converted
        to tokens (`num_kv`) where that is more."""
        return max(self.num_computed + self.num_output, int(self.num_kv))

    def charge(self, num_tokens: int) -> None:
        """Change the charge for the request to `num_tokens`."""
        if num_tokens != self.num_charged:
            self.queue.charge(self.flow_key, num_tokens - self.num_charged)
            self.num_charged = num_tokens


class RequestQueue:
    """Order the requests of one gateway that wait to be sent, with a fair queue per model, and charge tenants for what
    is served.

    `max_queued`: how many may wait. `kv_time_tokens`: tokens that 1,000 token-seconds of KV time count as; 0: KV time
    is not charged. The queue knows a request from `enter` until `leave`, whether it waits or was sent. A prompt is
    charged with the tokens that it probably has to compute, estimated from the cached fractions of its tenant's recent
    prompts in its lane; the charge is corrected when the request has ended.
    """

    def __init__(self, max_queued: int, kv_time_tokens: float = 0.0) -> None:
        self._max_queued = max_queued
        self._kv_time_tokens = kv_time_tokens
        self._queues: dict[str, FairQueue] = {}
        self._windows: dict[str, FairnessWindow] = {}
        self._sample_at = -math.inf
        self._entries: dict[RequestId, _QueueEntry] = {}
        self._num_waiting = 0
        self._uncached: dict[FlowKey, float] = {}

    def __len__(self) -> int:
        """Return the number of requests that wait; those that were sent do not count."""
        return self._num_waiting

    def __contains__(self, request: RequestId) -> bool:
        """Return whether the request was admitted and has not ended."""
        return request in self._entries

    # ---- one request, from arrival to end

    def item_for(self, request: Request, weight: float) -> QueueItem:
        """Return the queue item of a request that arrives now, with the prompt tokens that it would be charged.

        Does not add the request. `weight` is that of its tenant.
        """
        flow_key = FlowKey(request.lane, request.tenant)
        num_tokens = max(1, round(len(request.prompt_tokens) * self._uncached.get(flow_key, 1.0)))
        return QueueItem(flow_key=flow_key, num_tokens=num_tokens, weight=weight, priority=request.priority)

    def enter(self, request: Request, item: QueueItem) -> RequestId | None:
        """Add a waiting request; return the request to drop because too many wait, or None when there is room.

        The request to drop may be the new one. `item`: the result of `item_for`.
        """
        queue = self._queues.setdefault(request.model, FairQueue())
        number = queue.push(request.id, item)
        self._entries[request.id] = _QueueEntry(
            queue, item, item.flow_key, number, len(request.prompt_tokens), item.num_tokens
        )
        self._num_waiting += 1
        return queue.fullest() if self._num_waiting > self._max_queued else None

    def send(self, request: RequestId, num_tokens: int | None = None) -> None:
        """Mark a waiting request as sent and charge its tenant. `num_tokens`: prompt tokens that its workers will
        probably compute; None keeps the earlier estimate."""
        entry = self._entries[request]
        entry.credit = entry.queue.pop(request)
        entry.num_charged += entry.item.num_tokens
        entry.num_computed = entry.item.num_tokens if num_tokens is None else num_tokens
        entry.charge(entry.num_due)
        entry.is_sent = True
        self._num_waiting -= 1

    def put_back(self, request: RequestId) -> None:
        """Make a sent request wait again, at its old position in the queue, because its workers rejected or lost it.

        Does nothing when the request waits already or is unknown. While it waits, a request that has produced output is
        ordered as if it had one token, so that it goes before others; its real cost is charged when it is sent. The
        charge for its output and KV time remains.
        """
        entry = self._entries.get(request)
        if entry is not None and entry.is_sent:
            if entry.num_output:
                entry.item = replace(entry.item, num_tokens=1)
            entry.num_computed = 0
            entry.charge(entry.num_due + entry.item.num_tokens)
            entry.queue.put_back(request, entry.item, entry.number, entry.credit)
            entry.num_charged -= entry.item.num_tokens
            entry.is_sent = False
            self._num_waiting += 1

    def withdraw(self, request: RequestId) -> None:
        """Take a waiting request out of the order and count it as sent, as `send` does, because none of its choices
        needs a worker any more.

        Does nothing when the request does not wait.
        """
        entry = self._entries.get(request)
        if entry is not None and not entry.is_sent:
            self.send(request)

    def charge_output(self, request: RequestId, num_tokens: int) -> None:
        """Add `num_tokens` sampled tokens to a request, and raise the charge to its tenant if necessary.

        The charge for the request is raised to its computed plus its sampled tokens; a charge that is already higher,
        because of KV time, stays. Does nothing when the request is unknown.
        """
        entry = self._entries.get(request)
        if entry is not None:
            entry.num_output += num_tokens
            # As entry.charge(entry.num_due) in two thirds of its time, because each message with tokens comes here.
            num_more = entry.num_computed + entry.num_output - entry.num_charged
            if num_more > 0:
                entry.queue.charge(entry.flow_key, num_more)
                entry.num_charged += num_more

    def charge_kv_time(self, request: RequestId, token_seconds: float) -> None:
        """Add `token_seconds` of KV time to a request, and raise the charge to its tenant if necessary.

        The charge for the request is raised to its KV time, converted to tokens, where this exceeds its computed plus
        its sampled tokens. Does nothing when the request is unknown.
        """
        entry = self._entries.get(request)
        if entry is not None:
            entry.num_kv += token_seconds * self._kv_time_tokens / 1000
            entry.charge(entry.num_due)

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """Remove a request that has ended, whether it waits or was sent; does nothing when it is unknown.

        `num_cached`: prompt tokens that a worker found in a prefix cache, by which the charge of a sent request is
        corrected; None when unknown, which leaves the charge as it is.
        """
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        if not entry.is_sent:
            entry.queue.remove(request)
            self._num_waiting -= 1
        elif num_cached is not None:
            self._settle(entry, entry.num_prompt - num_cached)

    # ---- order

    def models(self) -> list[str]:
        """Return the models with waiting requests."""
        return [model for model, queue in self._queues.items() if len(queue)]

    def num_waiting(self, model: str, lane: Lane) -> int:
        """Return the number of waiting requests of one model and lane."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.num_waiting(lane)

    def first(self, model: str, skipped: Set[Lane] = frozenset()) -> RequestId | None:
        """Return the request for `model` to send next, without removing it. Requests of the lanes in `skipped` are left
        out; None when no other request waits."""
        queue = self._queues.get(model)
        return None if queue is None else queue.first(skipped)

    def charged(self, request: RequestId) -> int:
        """Return how many prompt tokens of a request will probably be computed, because no cache holds their KV. Raises
        KeyError when the request is unknown.

        For a sent request this is the estimate at its placement, for a waiting one the estimate at its arrival.
        """
        entry = self._entries[request]
        return entry.num_computed if entry.is_sent else entry.num_expected

    def num_ahead(self, model: str, item: QueueItem, rivals: Set[Lane] = ALL_LANES) -> int:
        """Return the number of prompt tokens in the waiting requests for `model` that would be sent before a new
        request `item`, if no other request arrived.

        `rivals`: lanes whose requests wait for the same workers as `item`; requests of more urgent lanes count only if
        their lane is one of these.
        """
        queue = self._queues.get(model)
        return 0 if queue is None else queue.num_ahead(item, rivals)

    # ---- other gateways

    def served(self) -> Iterator[tuple[ModelFlow, int]]:
        """Yield the tokens that this gateway has charged since it started, for each model, tenant and lane."""
        for model, queue in self._queues.items():
            for flow_key, num_tokens in queue.served().items():
                yield ModelFlow(model, flow_key), num_tokens

    def add_remote_usage(self, model_flow: ModelFlow, num_tokens: int) -> None:
        """Add `num_tokens` tokens, which another gateway has charged, to the counter of a model, tenant and lane."""
        self._queues.setdefault(model_flow.model, FairQueue()).add_to_counter(model_flow.flow_key, num_tokens)

    # ---- fairness of the last minute

    def sample(self, now: float) -> None:
        """Record how much the waiting tenants of each model were charged, for `fairness`; does nothing within a second
        of the last sample."""
        if now < self._sample_at:
            return
        self._sample_at = now + PERIOD_S
        for model, queue in self._queues.items():
            window = self._windows.setdefault(model, FairnessWindow())
            window.add(now, queue.services_of_waiting())

    def fairness(self, now: float) -> Mapping[tuple[str, Lane], float]:
        """Return Jain's index of the charges in the minute before `now`, by (model, lane), for every lane of each model
        that was requested; `FairnessWindow.index` computes it."""
        return {
            (model, lane): window.index(lane, now) for model, window in self._windows.copy().items() for lane in Lane
        }

    def check(self) -> None:
        """Raise AssertionError if a stored count or sum differs from a recount over the waiting requests; for tests."""
        for queue in self._queues.values():
            queue.check()
        for request, entry in self._entries.items():
            assert entry.num_charged == entry.num_due, f"{request} is charged {entry.num_charged}, not {entry.num_due}"
        waiting = [request for request, entry in self._entries.items() if not entry.is_sent]
        assert len(waiting) == self._num_waiting == sum(map(len, self._queues.values())), f"{self!r} miscounts"

    def __repr__(self) -> str:
        return f"<request queue {self._num_waiting} waiting, {len(self._entries) - self._num_waiting} sent>"

    # ---- charges

    def _settle(self, entry: _QueueEntry, num_computed: int) -> None:
        entry.num_computed = num_computed
        entry.charge(entry.num_due)
        before = self._uncached.get(entry.flow_key, 1.0)
        self._uncached[entry.flow_key] = before + LEARNING * (num_computed / entry.num_prompt - before)
