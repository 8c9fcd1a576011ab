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
    """Fixed limits of one scheduler; ValueError is raised for a limit below 1.

    - `max_num_batched_tokens`: token budget of a step, which `targets` may reduce for a single step; `max_num_seqs`:
      sequences that run at a time; `max_model_len`: most prompt and output tokens of a request.
    - Without `enable_chunked_prefill` a prompt is computed in one step even where it exceeds the budget, with at most
      one such prompt per step.
    - `digest_handoffs`: compute checksums of blocks that other workers read.
    - `vocab_size`: token ids are below it.
    - `batch_max_share`: fraction of seats and blocks up to which batch sequences start.
    - `max_lane_preemptions`: most times that a running sequence yields its seat to one of a more urgent lane.
    - `max_lane_pause_s`: seconds after which a preempted sequence that still waits is the next to start.
    - `queue_horizon_s`: predicted seconds of prefill that are accepted in addition to the longest prompt of its size
      class; 0: two full steps, None: no limit.
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


class BlockDemand(NamedTuple):
    """Free blocks that the scheduler may need soon.

    `num_running`: one block for each running sequence; `num_reserved`: blocks reserved for all pulls that have none
    yet; `largest_reservation`: those of the largest such pull.
    """

    num_running: int = 0
    num_reserved: int = 0
    largest_reservation: int = 0


NO_DEMAND = BlockDemand()


def chunk_size(remaining: int, budget: int, has_prefill: bool, limits: SchedulerLimits) -> int:
    """Return how many of its `remaining` tokens a sequence computes in a step that has `budget` tokens left; 0: none.

    `has_prefill`: the step already computes another prompt.
    """
    if remaining <= 1 or limits.enable_chunked_prefill:
        return min(remaining, budget)
    if remaining <= budget:
        return remaining
    return 0 if has_prefill or budget == 0 else remaining


def may_offer(need: int, num_leased: int, num_blocks: int, largest_reservation: int) -> bool:
    """Return whether a prefill that will lease `need` blocks may start, in a pool of `num_blocks` of which `num_leased`
    are leased.

    Leases must leave room for `largest_reservation`, the blocks of the largest pull that has none yet. So the oldest
    pull always gets its blocks from sequences that end or are preempted, and two workers that prefill for each other
    cannot deadlock.
    """
    return num_leased + need + largest_reservation <= num_blocks


GROWTH_BLOCKS = 2
"""Blocks that a migrating sequence may fill during its migration; reserved with the pull."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens fill, rounded up."""
    return -(-num_tokens // block_size)


def prefill_need(job: Job, block_size: int) -> int:
    """Return the number of blocks of a prefill, all of which it gets when it starts."""
    return blocks_for(job.num_known_tokens, block_size)


def num_seats(job: Job, limits: SchedulerLimits) -> int:
    """Return how many sequences of a job must fit at a time (seats of `max_num_seqs`): one per choice, up to half of
    all seats.

    Further choices may wait, since otherwise the job would wait for an idle worker.
    """
    return min(job.num_choices, max(1, limits.max_num_seqs // 2))


def pull_need(job: Job, limits: SchedulerLimits, num_blocks: int, block_size: int) -> int:
    """Return the number of blocks to reserve for a pull, at most `num_blocks`, the size of the pool.

    These are the blocks of the known tokens and one more per choice with a seat, so that decoding can begin. A job
    whose KV another attempt has computed may continue a sequence that still runs elsewhere, so GROWTH_BLOCKS are added
    for it.
    """
    num_choices, known = num_seats(job, limits), job.num_known_tokens
    limit = blocks_for(len(job.request.prompt_tokens) + job.request.sampling.max_tokens, block_size)
    shared = known // block_size
    spare = GROWTH_BLOCKS if isinstance(job, ResumeJob) and job.offer_attempt else 0
    need = blocks_for(known, block_size) + num_choices + spare
    return min(need, shared + num_choices * (limit - shared), num_blocks)
