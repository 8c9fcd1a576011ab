"""Define the scheduler's limits, and compute from them chunk sizes, the limit on leases, and the KV blocks and sequence
seats that a job needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.request import MAX_COUNT, Job, ResumeJob
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Hold the fixed limits of one scheduler.

    Raises ValueError if `max_num_batched_tokens`, `max_num_seqs` or `max_model_len` is below 1.

    - `max_num_batched_tokens`: token budget of a step, which may be less in a single step because of `targets`.
      `max_num_seqs`: most sequences that run at a time. `max_model_len`: most prompt and output tokens of a request
      together.
    - `enable_chunked_prefill`: if False, a prompt is computed in one step even where it exceeds the budget, with at
      most one such prompt per step.
    - `digest_handoffs`: whether to compute checksums of blocks that other workers read.
    - `targets`: latency targets of each lane. `vocab_size`: number of token ids of the model, which are all below it.
    - `batch_max_share`: largest fraction of the seats, and of the KV blocks, that batch sequences may take; checked
      when one of them starts.
    - `max_lane_preemptions`: how many times one sequence may be preempted in favour of sequences of more urgent lanes.
    - `max_lane_pause_s`: seconds after which a preempted sequence that still waits is the next to start.
    - `queue_horizon_s`: limit, in predicted seconds of prefill, on the sum of the accepted prompts of a size class
      without the longest of them. 0: the limit is the tokens of two full steps. None: no limit.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    digest_handoffs: bool = True
    targets: LatencyTargets = NO_TARGETS
    vocab_size: int = MAX_COUNT
    batch_max_share: float = 1.0
    max_lane_preemptions: int = 0
    max_lane_pause_s: float = 30.0
    queue_horizon_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Capacity(NamedTuple):
    """Hold a number of KV blocks and a number of sequence seats (places of `max_num_seqs`) of a worker."""

    num_blocks: int
    num_seats: int

    def plus(self, other: Capacity) -> Capacity:
        return Capacity(self.num_blocks + other.num_blocks, self.num_seats + other.num_seats)


class BlockDemand(NamedTuple):
    """Hold how many free blocks the scheduler may need soon.

    `num_running`: one block for each running sequence. `num_reserved`: blocks reserved for all pulls that hold no
    blocks yet. `largest_reservation`: blocks reserved for the largest of these pulls.
    """

    num_running: int = 0
    num_reserved: int = 0
    largest_reservation: int = 0


NO_DEMAND = BlockDemand()


def chunk_size(remaining: int, budget: int, has_prefill: bool, limits: SchedulerLimits) -> int:
    """Return how many of its `remaining` tokens a sequence computes in a step that has `budget` tokens left; 0: none.

    `has_prefill`: the step already computes another prompt. Without chunked prefill the result is `remaining` or 0, and
    a prompt that exceeds the budget is computed only where `has_prefill` is False.
    """
    if remaining <= 1 or limits.enable_chunked_prefill:
        return min(remaining, budget)
    if remaining <= budget:
        return remaining
    return 0 if has_prefill or budget == 0 else remaining


def may_offer(need: int, num_leased: int, num_blocks: int, largest_reservation: int) -> bool:
    """Return whether a prefill that will lease `need` blocks may start, in a pool of `num_blocks` blocks, `num_leased`
    of which are leased.

    Leases must leave room for `largest_reservation`, the number of blocks reserved for the largest pull that holds none
    yet. So the oldest pull always gets its blocks from sequences that end or are preempted, and two workers that
    prefill for each other cannot deadlock.
    """
    return num_leased + need + largest_reservation <= num_blocks


GROWTH_BLOCKS = 2
"""Blocks that a migrating sequence may fill during its migration; reserved with the pull."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens fill, rounded up."""
    return -(-num_tokens // block_size)


def num_seats(job: Job, limits: SchedulerLimits) -> int:
    """Return how many seats (places of `max_num_seqs`) a job needs at once: one per choice, at most half of all seats.

    Choices beyond this number wait for free seats. A job that needed seats for all of many choices would wait until the
    worker is idle.
    """
    return min(job.num_choices, max(1, limits.max_num_seqs // 2))


def pull_need(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> int:
    """Return the number of blocks to reserve for a job whose KV is to be pulled; at most `num_blocks`, the size of the
    pool.

    These are the blocks of the known tokens, and one more per choice with a seat, so that decoding can begin. For a job
    with `offer_attempt`, GROWTH_BLOCKS are added, because it may continue a sequence that still runs at its source.
    """
    num_choices, known = num_seats(job, limits), job.num_known_tokens
    limit = blocks_for(len(job.request.prompt_tokens) + job.request.sampling.max_tokens, block_size)
    shared = known // block_size
    spare = GROWTH_BLOCKS if isinstance(job, ResumeJob) and job.offer_attempt else 0
    need = blocks_for(known, block_size) + num_choices + spare
    return min(need, shared + num_choices * (limit - shared), num_blocks)
