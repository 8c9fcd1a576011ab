"""Count the demand of one model at one gateway, as gateways report it to planners and as the simulator counts it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import Count
from tandem.core.errors import ErrorKind

NO_ROOM = frozenset(
    kind.value for kind in (ErrorKind.OVERLOADED, ErrorKind.SLO_MISS, ErrorKind.NO_WORKER, ErrorKind.DEADLINE)
)
"""Requests that ended so would have been served by more workers."""


@dataclass(slots=True)
class DemandTotals:
    """Counts of one model since the gateway process started.

    `num_requests` and `num_input_tokens` count at arrival; `num_served`, `num_cached_tokens` and `num_prefill_pairs` at
    the first token; all others at the end of a request. `num_prefill_pairs` sums, over prompts, the pairs (token
    computed, token it attends to).
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
        self.num_requests += 1
        self.num_input_tokens += num_prompt

    def add_prompt(self, num_prompt: int, num_cached: int) -> None:
        """Count a prompt that was computed, of which `num_cached` tokens came out of a cache."""
        num_new = num_prompt - num_cached
        self.num_served += 1
        self.num_cached_tokens += num_cached
        self.num_prefill_pairs += num_new * num_cached + num_new * (num_new + 1) // 2

    def add_end(self, outcome: str, *, is_late: bool, num_output: int, num_gaps: int, num_late_gaps: int) -> None:
        """Count an end. `outcome`: the kind of its error or why it finished; `is_late`: its first token was."""
        self.num_output_tokens += num_output
        self.num_gaps += num_gaps
        self.num_late_gaps += num_late_gaps
        if outcome in NO_ROOM:
            self.num_failed += 1
        elif outcome != ErrorKind.CANCELLED.value:
            self.num_late_ttft += is_late


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """Requests of one model that are not placed on a worker yet, and the number of tokens in their prompts."""

    num_requests: Count = 0
    num_tokens: Count = 0
