"""Compute the demand at all gateways between two readings of the totals that gateways publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.core.ids import GatewayId
from tandem.scaling.cluster_state import Demand
from tandem.scaling.demand_totals import DemandTotals, QueueBacklog, demand_between, sum_backlogs
from tandem.stores.demand_store import DemandRecord

SILENT_S = 5.0
"""Age at which a gateway's record is too old to use; gateways publish every second."""


class DemandDeltaResult(NamedTuple):
    """Demand for one model since the previous call of `DemandDelta.look`.

    `demand`: counts of requests and tokens at all gateways since that call; None if they are unknown. `problem`: why
    they are unknown, else empty. `backlog`: requests that wait at gateways now, and the tokens of their prompts;
    gateways whose record is older than `SILENT_S` seconds are left out. `num_gateways`: number of gateways that have
    published a record."""

    demand: Demand | None
    problem: str = ""
    backlog: QueueBacklog = QueueBacklog()
    num_gateways: int = 0


class DemandDelta:
    """Compute the demand for one model from the running totals that gateways publish.

    It keeps each gateway's totals from the last call of `look`. A call whose records cannot be used changes nothing, so
    the demand of the next usable call covers both intervals.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[GatewayId, DemandTotals] = {}
        self._observed_at: float | None = None

    def look(self, records: Sequence[DemandRecord], now: float) -> DemandDeltaResult:
        """Return the demand at all gateways since the previous call.

        `records`: the latest record of each gateway. `now`: seconds of a monotonic clock. The demand is unknown (None)
        at the first call, if there are no records, and if a gateway's record is older than `SILENT_S` seconds."""
        problem = _problem(records)
        recent = [record for record in records if record.age_s <= SILENT_S]
        backlog = sum_backlogs(record.backlog.get(self._model, QueueBacklog()) for record in recent)
        if problem:
            return DemandDeltaResult(None, problem, backlog, len(records))
        totals_by_gateway = {record.gateway: record.totals.get(self._model, DemandTotals()) for record in records}
        known = self._known
        previous_at = self._observed_at
        self._known = totals_by_gateway
        self._observed_at = now
        if previous_at is None or now <= previous_at:
            return DemandDeltaResult(
                None, "this is the first look at the demand of the gateways", backlog, len(records)
            )
        # All demand of a gateway that started since the last look is new. A gateway that was only missing in the last
        # look has counted for an unknown time, so its totals count from this look on.
        begun = {record.gateway for record in records if record.lived_s + record.age_s <= now - previous_at}
        counted = [
            (totals, known.get(gateway, DemandTotals()))
            for gateway, totals in totals_by_gateway.items()
            if gateway in known or gateway in begun
        ]
        return DemandDeltaResult(demand_between(counted, now - previous_at), "", backlog, len(totals_by_gateway))


def _problem(records: Sequence[DemandRecord]) -> str:
    if not records:
        return "no gateway publishes its demand"
    oldest = max(records, key=lambda record: record.age_s)
    if oldest.age_s > SILENT_S:
        return f"gateway {oldest.gateway} has published nothing for {oldest.age_s:.0f} s, so its demand is not known"
    return ""
