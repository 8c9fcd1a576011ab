"""What a worker has accepted of prompts and not computed, and how much it takes on, as functions; never keeps a job."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sched.policy import SchedulerLimits
from tandem.sched.sequence import Sequence, Status

HORIZON_STEPS = 2
"""While one step runs the next is filled from what is here, and the gateways have that long to send more."""


def num_queued(seq: Sequence, block_size: int) -> int:
    """Known tokens whose KV is neither computed nor planned nor likely in the prefix cache, of a sequence that may be
    computed and is more than a decode."""
    if not seq.may_start or seq.num_remaining <= 1:
        return 0
    hits = seq.num_hits_seen * block_size if seq.status is Status.WAITING else 0
    return max(1, seq.num_remaining - hits)


def by_lane(seqs: Iterable[Sequence], block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each lane and those more urgent: their queued tokens, and how many of them the longest prompt has."""
    tokens, longest = [0] * len(Lane), [0] * len(Lane)
    for seq in seqs:
        num = num_queued(seq, block_size)
        if num:
            tokens[seq.lane] += num
            longest[seq.lane] = max(longest[seq.lane], num)
    return tuple(accumulate(tokens)), tuple(accumulate(longest, max))


def horizon_tokens(limits: SchedulerLimits, cost: StepCost | None) -> int:
    """What is taken on beside the longest prompt. `cost` None: not known yet, then it is two full steps. 0: any."""
    horizon_s, step_tokens = limits.queue_horizon_s, limits.max_num_batched_tokens
    if horizon_s is None:
        return 0
    if horizon_s == 0 or cost is None:
        return HORIZON_STEPS * step_tokens
    step_s = cost.predict(StepFeatures(step_tokens, num_prefill_pairs=step_tokens * (step_tokens + 1) // 2))
    return max(1, int(step_tokens * horizon_s / step_s)) if step_s > 0 else HORIZON_STEPS * step_tokens
