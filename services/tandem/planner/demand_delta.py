"""What came to all gateways between two looks at their totals; pure, and never asks a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from tandem.core.ids import GatewayId
from tandem.scaling.cluster_state import Demand
from tandem.stores.demand_store import DemandRecord, DemandTotals, QueueBacklog

SILENT_S = 5.0
"""A gateway speaks every second; what came to one that has been silent for so long is not known."""


class DemandDeltaResult(NamedTuple):
    """`demand` is None where nothing is to be concluded, for the reason `problem`. `num_gateways` that speak."""

    demand: Demand | None
    problem: str = ""
    backlog: QueueBacklog = QueueBacklog()
    num_gateways: int = 0


class DemandDelta:
    """Of one model. A look that cannot be used changes nothing, so the next one that can spans both."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[GatewayId, DemandTotals] = {}
        self._looked_at: float | None = None

    def look(self, records: Sequence[DemandRecord], now: float) -> DemandDeltaResult:
        """`now` in seconds of a clock that does not go back."""
        problem = _problem(records)
        if problem:
            return DemandDeltaResult(None, problem, num_gateways=len(records))
        backlog = _sum(record.backlog.get(self._model, QueueBacklog()) for record in records)
        told = {record.gateway: record.totals.get(self._model, DemandTotals()) for record in records}
        known, since = self._known, self._looked_at
        self._known, self._looked_at = told, now
        if since is None or now <= since:
            return DemandDeltaResult(
                None, "this is the first look at what gateways are asked for", backlog, len(records)
            )
        # All that came to one that has begun since the last look has come since then. What one that was only away has
        # counted until now is of no known time, so it counts from here on.
        begun = {record.gateway for record in records if record.lived_s + record.age_s <= now - since}
        counted = [
            (totals, known.get(gateway, DemandTotals()))
            for gateway, totals in told.items()
            if gateway in known or gateway in begun
        ]
        # Totals of one life never fall; if somebody else wrote them it must not become a negative rate.
        grown: dict[str, Any] = {
            one.name: max(0, sum(getattr(totals, one.name) - getattr(before, one.name) for totals, before in counted))
            for one in fields(DemandTotals)
        }
        # A gateway of the version before does not count whom it serves, and then nobody knows of how many.
        if any(totals.num_prefill_pairs and not totals.num_served for totals, _ in counted):
            grown["num_served"] = None
        return DemandDeltaResult(Demand(seconds=now - since, **grown), "", backlog, len(told))


def _problem(records: Sequence[DemandRecord]) -> str:
    if not records:
        return "no gateway says what it is asked for"
    oldest = max(records, key=lambda record: record.age_s)
    if oldest.age_s > SILENT_S:
        return f"gateway {oldest.gateway} has said nothing for {oldest.age_s:.0f} s, so what came to it is not known"
    return ""


def _sum(backlogs: Iterable[QueueBacklog]) -> QueueBacklog:
    waiting = list(backlogs)
    return QueueBacklog(
        num_requests=sum(b.num_requests for b in waiting), num_tokens=sum(b.num_tokens for b in waiting)
    )
