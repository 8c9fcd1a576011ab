"""How a step's token budget is split and who must give way, as functions of plain numbers; never changes state."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.request import MAX_COUNT
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`max_num_batched_tokens` is the budget of one step; `targets` may make a step's budget smaller. Without chunked
    prefill a prompt is computed in one step even where it exceeds the budget, at most one such prompt per step.
    `queue_horizon_s`: predicted prefill that is accepted beside the longest of its size; 0: two full steps, None: any.
    The model's token ids are below `vocab_size`."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    digest_handoffs: bool = True
    targets: LatencyTargets = NO_TARGETS
    vocab_size: int = MAX_COUNT
    queue_horizon_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def chunk_size(remaining: int, budget: int, has_prefill: bool, limits: SchedulerLimits) -> int:
    """How many of `remaining` tokens one sequence computes in a step with `budget` tokens left.

    `has_prefill`: this step computes another prompt already.
    """
    if remaining <= 1 or limits.enable_chunked_prefill:
        return min(remaining, budget)
    if remaining <= budget:
        return remaining
    return 0 if has_prefill or budget == 0 else remaining


def may_offer(need: int, num_leased: int, num_blocks: int, largest_promise: int) -> bool:
    """Whether a prefill that will lease `need` blocks may start.

    Leases never take what the largest promised pull needs: leased + promise <= pool. So the oldest pull always gets
    room from sequences that end or give way, and two workers that prefill for each other cannot wait in a circle.
    """
    return num_leased + need + largest_promise <= num_blocks
