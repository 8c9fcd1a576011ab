"""Count the demand of one model at one gateway.

Gateways report these counts to planners; the simulator counts the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from tandem.core.config import Count
from tandem.core.errors import ErrorKind
from tandem.scaling.cluster_state import Demand

NO_ROOM = frozenset(
    kind.value for kind in (ErrorKind.OVERLOADED, ErrorKind.SLO_MISS, ErrorKind.NO_WORKER, ErrorKind.DEADLINE)
)
"""Outcomes of requests that more workers could have served."""


@dataclass(slots=True)
class DemandTotals:
    """Counts of one model's requests at one gateway since its process started, from which planners compute `Demand`.

    - At arrival: `num_requests`, `num_input_tokens`.
    - At the first token: `num_served`, `num_cached_tokens` (prompt tokens from a cache), and `num_prefill_pairs`, the
      sum over prompts of the pairs (token computed, token it attends to).
    - At the end: `num_output_tokens`, `num_gaps` between two tokens, `num_late_gaps` and `num_late_ttft` over their
      targets, and `num_failed` requests that more workers could have served.
    """

    num_requests: Count = 0
    num_input_tokens: Count = 0
    num_cached_tokens: Count = 0
    num_prefill_pairs: Count = 0
    num_output_tokens: Count = 0
    num_served: Count = 0
    num_late_ttft: Count = 0
    num_gaps: Count = 0
    num_late_gaps: Count = 0
    num_failed: Count = 0

    def add_arrival(self, num_prompt: int) -> None:
        """Count a request that arrived with a prompt of `num_prompt` tokens."""
        self.num_requests += 1
        self.num_input_tokens += num_prompt

    def add_prompt(self, num_prompt: int, num_cached: int) -> None:
        """Count a request whose first token was sampled; `num_cached` of its `num_prompt` prompt tokens were in a
        cache."""
        num_new = num_prompt - num_cached
        self.num_served += 1
        self.num_cached_tokens += num_cached
        self.num_prefill_pairs += num_new * num_cached + num_new * (num_new + 1) // 2

    def add_end(self, outcome: str, *, is_late: bool, num_output: int, num_gaps: int, num_late_gaps: int) -> None:
        """Count the end of a request.

        `outcome`: the value of its `ErrorKind` or of its `FinishReason`. `is_late`: whether its first token was later
        than the target. `num_output`: its output tokens. `num_gaps`: the times between two consecutive tokens, of which
        `num_late_gaps` exceeded the target. A cancelled request is never counted as late.
        """
        self.num_output_tokens += num_output
        self.num_gaps += num_gaps
        self.num_late_gaps += num_late_gaps
        if outcome in NO_ROOM:
            self.num_failed += 1
        elif outcome != ErrorKind.CANCELLED.value:
            self.num_late_ttft += is_late


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """Requests of one model that wait at a gateway for a worker, and the tokens of their prompts."""

    num_requests: Count = 0
    num_tokens: Count = 0


def sum_backlogs(backlogs: Iterable[QueueBacklog]) -> QueueBacklog:
    waiting = list(backlogs)
    return QueueBacklog(
        num_requests=sum(b.num_requests for b in waiting), num_tokens=sum(b.num_tokens for b in waiting)
    )


def demand_between(counted: Iterable[tuple[DemandTotals, DemandTotals]], seconds: float) -> Demand:
    """Return the demand of an interval of `seconds` seconds.

    `counted`: for each gateway, its totals at the end and at the beginning of the interval. A count that would be
    negative becomes 0: the totals of one gateway process do not fall, but another writer may have changed the record of
    a gateway."""
    pairs = list(counted)
    grown: dict[str, Any] = {
        total.name: max(0, sum(getattr(new, total.name) - getattr(old, total.name) for new, old in pairs))
        for total in fields(DemandTotals)
    }
    # A gateway of an older version does not count served requests; then their number is unknown.
    if any(totals.num_prefill_pairs and not totals.num_served for totals, _ in pairs):
        grown["num_served"] = None
    return Demand(seconds=seconds, **grown)
