"""Define the scheduler's limits, what follows from them (the size of a chunk, the limit on leases), and how many KV
blocks and sequence seats a job needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.request import MAX_COUNT, Job, ResumeJob
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Static limits of one scheduler.

    `max_num_batched_tokens` is the token budget of one step; `targets` may reduce the budget of a single step. Without
    `enable_chunked_prefill` a prompt is computed in one step even where it exceeds the budget, with at most one such
    prompt per step. `queue_horizon_s` is the predicted prefill time, in seconds, that is accepted beside the longest
    prompt of its size class; 0: two full steps, None: no limit. Token ids of the model are below `vocab_size`.
    """

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


class BlockDemand(NamedTuple):
    """Free blocks that the scheduler may need soon: one for each of `num_running` sequences, `num_reserved` for the
    pulls that have none yet, and of these `largest_reservation` for one pull."""

    num_running: int = 0
    num_reserved: int = 0
    largest_reservation: int = 0


NO_DEMAND = BlockDemand()


def chunk_size(remaining: int, budget: int, has_prefill: bool, limits: SchedulerLimits) -> int:
    """Return how many of `remaining` tokens one sequence computes in a step with `budget` tokens left.

    `has_prefill`: the step already computes another prompt.
    """
    if remaining <= 1 or limits.enable_chunked_prefill:
        return min(remaining, budget)
    if remaining <= budget:
        return remaining
    return 0 if has_prefill or budget == 0 else remaining


def may_offer(need: int, num_leased: int, num_blocks: int, largest_reservation: int) -> bool:
    """Return whether a prefill may start that will lease `need` blocks.

    Leases must leave room for the largest pull with reserved blocks: leased + reserved <= pool. So the oldest pull
    always gets its blocks from sequences that end or are preempted, and two workers that prefill for each other cannot
    deadlock.
    """
    return num_leased + need + largest_reservation <= num_blocks


GROWTH_BLOCKS = 2
"""Blocks that a migrating sequence may fill during its migration; reserved with the pull."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens fill, rounded up."""
    return -(-num_tokens // block_size)


def prefill_need(job: Job, block_size: int) -> int:
    """Count the blocks that a prefill takes, all of them when it starts."""
    return blocks_for(job.num_known_tokens, block_size)


def num_seats(job: Job, limits: SchedulerLimits) -> int:
    """Count the sequences (seats of `max_num_seqs`) that a job needs at once. Choices beyond half of a worker's seats
    may wait, since otherwise the job would wait for an idle worker."""
    return min(job.num_choices, max(1, limits.max_num_seqs // 2))


def pull_need(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> int:
    """Count the blocks that a pull reserves, at most `num_blocks`.

    These are the blocks of the known tokens and one more per choice with a seat, so that decoding can begin. KV of
    another attempt may come from a sequence that is still running, so `GROWTH_BLOCKS` are added.
    """
    num_choices, known = num_seats(job, limits), job.num_known_tokens
    limit = blocks_for(len(job.request.prompt_tokens) + job.request.sampling.max_tokens, block_size)
    shared = known // block_size
    spare = GROWTH_BLOCKS if isinstance(job, ResumeJob) and job.offer_attempt else 0
    need = blocks_for(known, block_size) + num_choices + spare
    return min(need, shared + num_choices * (limit - shared), num_blocks)
