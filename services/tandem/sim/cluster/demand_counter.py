"""Count the demand that gateways report to a planner: requests when they arrive, everything else when they end."""

from __future__ import annotations

from collections import Counter

from tandem.core.events import Finished
from tandem.core.slo import Slo
from tandem.scaling.cluster_state import Demand
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.workload.scheduled_request import ScheduledRequest

_COUNTS = (
    "num_requests", "num_input_tokens", "num_served", "num_cached_tokens", "num_output_tokens", "num_prefill_pairs",
    "num_late_ttft", "num_late_itl", "num_late_gaps", "num_gaps", "num_failed",
)  # fmt: skip


class Meter:
    """Own the demand counters of all gateways together."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._taken_at = 0.0
        self._counts: Counter[str] = Counter()
        self._num_sent = 0
        self._num_sent_tokens = 0

    @property
    def mean_input(self) -> float:
        """Mean number of prompt tokens of all requests so far."""
        return self._num_sent_tokens / max(1, self._num_sent)

    def sent(self, scheduled: ScheduledRequest) -> None:
        num_tokens = len(scheduled.request.prompt_tokens)
        self._num_sent += 1
        self._num_sent_tokens += num_tokens
        self._counts["num_requests"] += 1
        self._counts["num_input_tokens"] += num_tokens

    def ended(self, trace: ClientTrace) -> None:
        counts, outcome = self._counts, trace.outcome
        counts["num_served"] += bool(trace.token_times)
        counts["num_output_tokens"] += len(trace.token_times)
        if not isinstance(outcome, Finished):
            counts["num_failed"] += 1
            return
        gaps, cached = trace.gaps_s, outcome.num_cached_tokens
        fresh = trace.num_prompt - cached
        counts["num_cached_tokens"] += cached
        counts["num_prefill_pairs"] += fresh * cached + fresh * (fresh + 1) // 2
        counts["num_late_ttft"] += self._slo.violates_ttft(trace.ttft_s)
        num_late = self._slo.num_late(gaps)
        counts["num_late_itl"] += not self._slo.is_met(0.0, num_late, len(gaps))
        counts["num_late_gaps"] += num_late
        counts["num_gaps"] += len(gaps)

    def take(self, now: float) -> Demand:
        """Return the demand since the last call and reset the counters."""
        counts, self._counts = self._counts, Counter()
        seconds, self._taken_at = now - self._taken_at, now
        return Demand(seconds=seconds, **{name: counts[name] for name in _COUNTS})
