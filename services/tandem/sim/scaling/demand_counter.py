"""Count the demand that gateways report to a planner, by the rules of the real gateways."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.errors import TandemError
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.scaling.cluster_state import Demand
from tandem.scaling.demand_totals import DemandTotals, demand_between
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.workload.scheduled_request import ScheduledRequest


class Meter:
    """Count the requests and tokens of all gateways together, and return them as `Demand` for an autoscaler."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._totals = DemandTotals()
        self._taken = DemandTotals()
        self._taken_at = 0.0

    def sent(self, scheduled: ScheduledRequest) -> None:
        self._totals.add_arrival(len(scheduled.request.prompt_tokens))

    def computed(self, request: Request, num_cached: int) -> None:
        self._totals.add_prompt(len(request.prompt_tokens), num_cached)

    def ended(self, trace: ClientTrace) -> None:
        gaps, outcome = trace.gaps_s, trace.outcome
        self._totals.add_end(
            outcome.kind.value if isinstance(outcome, TandemError) else "finished",
            is_late=bool(trace.token_times) and self._slo.violates_ttft(trace.ttft_s),
            num_output=len(trace.token_times),
            num_gaps=len(gaps),
            num_late_gaps=self._slo.num_late(gaps),
        )

    def take(self, now: float) -> Demand:
        """Return the demand from the last call, or from time 0, until `now`, the present virtual time in seconds."""
        demand = demand_between([(self._totals, self._taken)], now - self._taken_at)
        self._taken, self._taken_at = replace(self._totals), now
        return demand
