"""Adds up what a gateway was asked for and how it was answered, by model, for planners; never tells anybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.orchestration.director import OpenRequest
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.stores.demand_store import DemandTotals, QueueBacklog


class DemandCounter:
    """An AnswerObserver that also counts requests as they are admitted and as their prompts are computed.
    `open_requests` returns those that run or wait. All on the event loop."""

    def __init__(self, targets: LatencyTargets, open_requests: Callable[[], Sequence[OpenRequest]]) -> None:
        self._open_requests = open_requests
        self._totals: dict[str, DemandTotals] = {}
        self._slos = {lane.label: targets.lane(lane).slo for lane in Lane}

    def totals(self) -> Mapping[str, DemandTotals]:
        """Since the beginning; the caller's own."""
        return {model: replace(totals) for model, totals in self._totals.items()}

    def backlog(self) -> Mapping[str, QueueBacklog]:
        """Those that wait for a place, by model."""
        found: dict[str, list[int]] = {}
        for request in (one.state.request for one in self._open_requests() if one.is_queued):
            found.setdefault(request.model, []).append(len(request.prompt_tokens))
        return {model: QueueBacklog(num_requests=len(sizes), num_tokens=sum(sizes)) for model, sizes in found.items()}

    def on_admitted(self, request: Request) -> None:
        """It was admitted, or refused because there is no room for it."""
        self._of(request.model).add_arrival(len(request.prompt_tokens))

    def on_first_token(self, request: Request, num_cached: int) -> None:
        """The first token of it was drawn, and so many tokens of its prompt were in a cache."""
        self._of(request.model).add_prompt(len(request.prompt_tokens), num_cached)

    def answered(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            self._count(record)

    def _count(self, record: RequestRecord) -> None:
        totals = self._totals.get(record.model)
        if totals is None:
            return  # refused before it was known what it asks for
        is_late = record.first_token_s is not None and self._slos[record.lane].violates_ttft(record.first_token_s)
        totals.add_end(
            record.outcome,
            is_late=is_late,
            num_output=record.usage.num_output,
            num_gaps=record.num_gaps,
            num_late_gaps=record.num_late_gaps,
        )

    def _of(self, model: str) -> DemandTotals:
        totals = self._totals.get(model)
        if totals is None:
            totals = self._totals[model] = DemandTotals()
        return totals
