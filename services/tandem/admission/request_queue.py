"""Order the requests of one gateway that wait for workers, with a fair queue for each model, and charge their
tenants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.admission.fair_queue import FairQueue
from tandem.admission.queue_item import FlowKey, QueueItem
from tandem.core.ids import RequestId
from tandem.core.request import Request

LEARNING = 0.1
"""Weight of the last request in the moving average of a tenant's uncached prompt fraction."""


class ModelFlow(NamedTuple):
    """Key of the token counts that gateways report to each other: one model, and one tenant in one lane."""

    model: str
    flow_key: FlowKey


@dataclass(slots=True)
class _QueueEntry:
    """State of one request. `num_expected` prompt tokens were expected to be computed when it arrived; `num_charged`
    are charged now."""

    model: str
    item: QueueItem
    number: int
    num_prompt: int
    num_expected: int
    num_charged: int
    is_sent: bool = False
    has_sampled: bool = False
    credit: int = 0


class RequestQueue:
    """Order the requests of one gateway that wait to be sent, with a fair queue per model, and charge tenants for what
    is served.

    `max_queued`: how many may wait. The queue knows a request from `enter` until `leave`, whether it waits or was sent.
    A prompt is charged with the tokens that it probably has to compute, estimated from the cached fractions of its
    tenant's recent prompts in its lane; the charge is corrected when the request has ended.
    """

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queues: dict[str, FairQueue] = {}
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
        return QueueItem(
            lane=request.lane, tenant=request.tenant, num_tokens=num_tokens, weight=weight, priority=request.priority
        )

    def enter(self, request: Request, item: QueueItem) -> RequestId | None:
        """Add a waiting request; return the request to drop because too many wait, or None when there is room.

        The request to drop may be the new one. `item`: the result of `item_for`.
        """
        queue = self._queues.setdefault(request.model, FairQueue())
        number = queue.push(request.id, item)
        self._entries[request.id] = _QueueEntry(
            request.model, item, number, len(request.prompt_tokens), item.num_tokens, item.num_tokens
        )
        self._num_waiting += 1
        return queue.fullest() if self._num_waiting > self._max_queued else None

    def send(self, request: RequestId, num_tokens: int | None = None) -> None:
        """Mark a waiting request as sent and charge its tenant. `num_tokens`: prompt tokens that its workers will
        probably compute; None keeps the earlier estimate."""
        entry = self._entries[request]
        queue = self._queues[entry.model]
        entry.credit = queue.pop(request)
        if num_tokens is not None:
            self._recharge(entry, num_tokens)
        entry.is_sent = True
        self._num_waiting -= 1

    def put_back(self, request: RequestId) -> None:
        """Return a sent request to its old position in the queue, because its workers rejected or lost it.

        Does nothing when the request waits already or is unknown. A request that has produced output counts as one
        token while it waits, so that it goes before others; its real cost is charged when it is sent.
        """
        entry = self._entries.get(request)
        if entry is not None and entry.is_sent:
            if entry.has_sampled:
                entry.item = replace(entry.item, num_tokens=1)
            self._recharge(entry, entry.item.num_tokens)
            self._queues[entry.model].put_back(request, entry.item, entry.number, entry.credit)
            entry.is_sent = False
            self._num_waiting += 1

    def withdraw(self, request: RequestId) -> None:
        """Mark a waiting request as sent although nothing is sent, because none of its choices needs a worker any more.

        Does nothing when the request does not wait.
        """
        entry = self._entries.get(request)
        if entry is not None and not entry.is_sent:
            self.send(request)

    def charge_output(self, request: RequestId, num_tokens: int) -> None:
        """Charge `num_tokens` more output tokens of a request to its tenant; does nothing when the request is
        unknown."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.has_sampled = True
            self._queues[entry.model].charge(entry.item.flow_key, num_tokens)

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """Remove a request that has ended, whether it waits or was sent; does nothing when it is unknown.

        `num_cached`: prompt tokens that a worker found in a prefix cache, by which the charge of a sent request is
        corrected; None when unknown, which leaves the charge as it is.
        """
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        if not entry.is_sent:
            self._queues[entry.model].remove(request)
            self._num_waiting -= 1
        elif num_cached is not None:
            self._settle(entry, entry.num_prompt - num_cached)

    # ---- order

    def models(self) -> list[str]:
        """Return the models with waiting requests."""
        return [model for model, queue in self._queues.items() if len(queue)]

    def num_waiting(self, model: str) -> int:
        """Return the number of waiting requests of one model."""
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue)

    def first(self, model: str) -> RequestId | None:
        queue = self._queues.get(model)
        return None if queue is None else queue.first()

    def charged(self, request: RequestId) -> int:
        """Return the prompt tokens of a request that will probably be computed. Raises KeyError when the request is
        unknown.

        For a sent request these are the tokens charged, for a waiting one the estimate at its arrival.
        """
        entry = self._entries[request]
        return entry.num_charged if entry.is_sent else entry.num_expected

    def num_ahead(self, model: str, item: QueueItem) -> int:
        """Return the prompt tokens of requests for `model` that would be sent before a new request `item`, if no other
        arrived."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.num_ahead(item)

    # ---- other gateways

    def served(self) -> Iterator[tuple[ModelFlow, int]]:
        """Yield the tokens that this gateway has served since it started, for each model, tenant and lane."""
        for model, queue in self._queues.items():
            for flow_key, num_tokens in queue.served().items():
                yield ModelFlow(model, flow_key), num_tokens

    def add_remote_usage(self, model_flow: ModelFlow, num_tokens: int) -> None:
        """Add tokens that another gateway has served to the counter of a model, tenant and lane."""
        self._queues.setdefault(model_flow.model, FairQueue()).add_to_counter(model_flow.flow_key, num_tokens)

    def check(self) -> None:
        """Raise AssertionError if a stored count or sum differs from a recount over the waiting requests; for tests."""
        for queue in self._queues.values():
            queue.check()
        waiting = [request for request, entry in self._entries.items() if not entry.is_sent]
        assert len(waiting) == self._num_waiting == sum(map(len, self._queues.values())), f"{self!r} miscounts"

    def __repr__(self) -> str:
        return f"<request queue {self._num_waiting} waiting, {len(self._entries) - self._num_waiting} sent>"

    # ---- charges

    def _recharge(self, entry: _QueueEntry, num_tokens: int) -> None:
        self._queues[entry.model].charge(entry.item.flow_key, num_tokens - entry.num_charged)
        entry.num_charged = num_tokens

    def _settle(self, entry: _QueueEntry, num_computed: int) -> None:
        flow_key = entry.item.flow_key
        self._recharge(entry, num_computed)
        before = self._uncached.get(flow_key, 1.0)
        self._uncached[flow_key] = before + LEARNING * (num_computed / entry.num_prompt - before)
