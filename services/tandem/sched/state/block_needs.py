"""Compute how many KV blocks and sequence seats a job needs."""

from __future__ import annotations

from tandem.core.request import Job, ResumeJob
from tandem.sched.state.limits import SchedulerLimits

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
