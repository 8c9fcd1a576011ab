"""The requests that wait at one gateway, a fair queue for each model, and what each was charged; never places one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.admission.fair_queue import FairQueue
from tandem.admission.queue_item import FlowKey, QueueItem
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import Request

LEARNING = 0.1
"""How much the last request says of a tenant's next one's cached share."""


class ModelFlow(NamedTuple):
    """What gateways tell each other tokens of."""

    model: str
    account: FlowKey


@dataclass(slots=True)
class _QueueEntry:
    """`num_expected` tokens of its prompt will probably be computed, as it was when it came; `num_charged` by now."""

    model: str
    ticket: QueueItem
    number: int
    num_prompt: int
    num_expected: int
    num_charged: int
    is_sent: bool = False
    has_sampled: bool = False
    credit: int = 0


class RequestQueue:
    """Every request that was admitted and has not ended has a standing here; it waits or was sent.

    A prompt is charged as what it will probably have to compute, by what of its tenant's prompts was cached of late,
    and settled when it has ended.
    """

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queues: dict[str, FairQueue] = {}
        self._standings: dict[RequestId, _QueueEntry] = {}
        self._num_waiting = 0
        self._uncached: dict[FlowKey, float] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def __contains__(self, request: RequestId) -> bool:
        """It was admitted and has not ended."""
        return request in self._standings

    # ---- one request, in the order of its life

    def ticket(self, request: Request, weight: float) -> QueueItem:
        """What it would be charged if it came now."""
        account = FlowKey(request.lane, request.tenant)
        num_tokens = max(1, round(len(request.prompt_tokens) * self._uncached.get(account, 1.0)))
        return QueueItem(
            lane=request.lane, tenant=request.tenant, num_tokens=num_tokens, weight=weight, priority=request.priority
        )

    def enter(self, request: Request, ticket: QueueItem) -> RequestId | None:
        """Wait. Returns who must leave because more wait than may; that may be the request itself."""
        queue = self._queues.setdefault(request.model, FairQueue())
        number = queue.push(request.id, ticket)
        self._standings[request.id] = _QueueEntry(
            request.model, ticket, number, len(request.prompt_tokens), ticket.num_tokens, ticket.num_tokens
        )
        self._num_waiting += 1
        return queue.fullest() if self._num_waiting > self._max_queued else None

    def send(self, request: RequestId, num_tokens: int | None = None) -> None:
        """One that waits is given to workers, where `num_tokens` of its prompt will probably be computed; None: nothing
        better is known than before."""
        standing = self._standings[request]
        queue = self._queues[standing.model]
        standing.credit = queue.pop(request)
        if num_tokens is not None:
            self._recharge(standing, num_tokens)
        standing.is_sent = True
        self._num_waiting -= 1

    def put_back(self, request: RequestId) -> None:
        """They did not take it, or it was lost: back to its place; nothing when it waits or has no standing. One whose
        client has begun to read counts as the shortest of all for as long as it waits; what it costs is charged when it
        is sent."""
        standing = self._standings.get(request)
        if standing is not None and standing.is_sent:
            if standing.has_sampled:
                standing.ticket = replace(standing.ticket, num_tokens=1)
            self._recharge(standing, standing.ticket.num_tokens)
            self._queues[standing.model].put_back(request, standing.ticket, standing.number, standing.credit)
            standing.is_sent = False
            self._num_waiting += 1

    def charge_output(self, request: RequestId, num_tokens: int) -> None:
        """It got so many more output tokens; nothing when it has no standing."""
        standing = self._standings.get(request)
        if standing is not None:
            standing.has_sampled = True
            self._queues[standing.model].charge(standing.ticket.account, num_tokens)

    def leave(self, request: RequestId, num_cached: int | None = None) -> None:
        """It has ended. `num_cached` prompt tokens were in a prefix cache; None: nobody knows. Nothing when it has no
        standing."""
        standing = self._standings.pop(request, None)
        if standing is None:
            return
        if not standing.is_sent:
            self._queues[standing.model].remove(request)
            self._num_waiting -= 1
        elif num_cached is not None:
            self._settle(standing, standing.num_prompt - num_cached)

    # ---- whose turn it is

    def models(self) -> list[str]:
        """Those that something waits for."""
        return [model for model, queue in self._queues.items() if len(queue)]

    def first(self, model: str) -> RequestId | None:
        queue = self._queues.get(model)
        return None if queue is None else queue.first()

    def lane(self, request: RequestId) -> Lane:
        return self._standings[request].ticket.lane

    def charged(self, request: RequestId) -> int:
        """Tokens of its prompt that will probably be computed."""
        standing = self._standings[request]
        return standing.num_charged if standing.is_sent else standing.num_expected

    def num_ahead(self, model: str, ticket: QueueItem) -> int:
        """Tokens of prompts that would be sent before one that comes now."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.num_ahead(ticket)

    # ---- other gateways

    def served(self) -> Iterator[tuple[ModelFlow, int]]:
        """Tokens served by this gateway since it began."""
        for model, queue in self._queues.items():
            for account, num_tokens in queue.served().items():
                yield ModelFlow(model, account), num_tokens

    def add_remote_usage(self, service: ModelFlow, num_tokens: int) -> None:
        """Other gateways have served so many more."""
        self._queues.setdefault(service.model, FairQueue()).absorb(service.account, num_tokens)

    def counter(self, service: ModelFlow) -> float:
        """As `FairQueue.counter`; 0 where nothing was ever served."""
        queue = self._queues.get(service.model)
        return 0.0 if queue is None else queue.counter(service.account)

    def check(self) -> None:
        """Re-add the books. Raises AssertionError naming what is off."""
        for queue in self._queues.values():
            queue.check()
        waiting = [request for request, standing in self._standings.items() if not standing.is_sent]
        assert len(waiting) == self._num_waiting == sum(map(len, self._queues.values())), f"{self!r} miscounts"

    def __repr__(self) -> str:
        return f"<line {self._num_waiting} waiting, {len(self._standings) - self._num_waiting} sent>"

    # ---- inside

    def _recharge(self, standing: _QueueEntry, num_tokens: int) -> None:
        self._queues[standing.model].charge(standing.ticket.account, num_tokens - standing.num_charged)
        standing.num_charged = num_tokens

    def _settle(self, standing: _QueueEntry, num_computed: int) -> None:
        account = standing.ticket.account
        self._recharge(standing, num_computed)
        before = self._uncached.get(account, 1.0)
        self._uncached[account] = before + LEARNING * (num_computed / standing.num_prompt - before)
