"""Compute the prompt tokens that a worker has accepted and still has to prefill, and check whether it may accept
another prompt.

The functions keep no state: their caller passes the sequences and limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import add
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.core.worker_load import HORIZON_STEPS, PROMPT_SIZES, WorkerLoad, prompt_size
from tandem.kv.block_pool import BlockPool
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.sequence import Sequence, Status

NUM_SIZES = len(PROMPT_SIZES) + 1
"""Prompt-size classes: those of `PROMPT_SIZES` and one without an upper bound."""


class QueuedTokens(NamedTuple):
    """Hold numbers of prompt tokens that a worker has accepted and not computed yet, in the form of `WorkerLoad`.

    `by_lane`: for each lane, the number for all prompts in this lane and more urgent ones. `by_size`: the same by lane
    and size class, in one flat tuple.
    """

    by_lane: tuple[int, ...]
    by_size: tuple[int, ...]


NOTHING_QUEUED = QueuedTokens((0,) * len(Lane), (0,) * (len(Lane) * len(PROMPT_SIZES)))


def num_queued(seq: Sequence, block_size: int) -> int:
    """Count the known tokens of a sequence that still need prefill on this worker; 0 for a decode.

    The count leaves out tokens whose KV is computed, planned or probably in the prefix cache, and tokens of a prefix
    that is being fetched. It is 0 for a `ResumeJob` whose producer has not begun to offer KV.
    """
    if not (seq.may_start or seq.num_awaited_blocks) or seq.num_remaining <= 1:
        return 0
    hits = max(seq.num_hits_seen, seq.num_awaited_blocks) * block_size if seq.status is Status.WAITING else 0
    return max(1, seq.num_remaining - hits)


def queued_tokens(seqs: Iterable[Sequence], block_size: int) -> tuple[QueuedTokens, QueuedTokens]:
    """Return the queued prefill tokens of all sequences, by lane and by size class: first the tokens of all prompts,
    then those of the longest prompt.

    The function runs after every step, most often with nothing queued, and returns constants in this case.
    """
    queued = [(seq.lane, num) for seq in seqs if (num := num_queued(seq, block_size))]
    if not queued:
        return NOTHING_QUEUED, NOTHING_QUEUED
    tokens, longest = [[0] * NUM_SIZES for _ in Lane], [[0] * NUM_SIZES for _ in Lane]
    for lane, num in queued:
        size = prompt_size(num)
        tokens[lane][size] += num
        longest[lane][size] = max(longest[lane][size], num)
    return _cumulative_totals(tokens, add), _cumulative_totals(longest, max)


def _cumulative_totals(rows: list[list[int]], join: Callable[[int, int], int]) -> QueuedTokens:
    """Add up `rows[lane][size]` with `join`, each time over all lanes and all sizes up to the given one."""
    above, by_size, by_lane = [0] * len(rows[0]), list[int](), list[int]()
    for row in rows:
        above = list(map(join, above, row))
        *parts, whole = accumulate(above, join)
        by_size += parts
        by_lane.append(whole)
    return QueuedTokens(tuple(by_lane), tuple(by_size))


def check_backlog(seq: Sequence, pool: BlockPool, load: WorkerLoad) -> None:
    """Raise TandemError (OVERLOADED) if the worker has too many queued prompt tokens to accept the prompt of a new
    sequence.

    A rejected prompt waits at its gateway. `load`: the worker's load without the new sequence. Prefix-cache hits are
    not counted, since they need no prefill; `seq.num_hits_seen` is set to them.
    """
    seq.num_hits_seen = pool.count_hits(seq.reusable(pool.block_size))
    num_tokens = num_queued(seq, pool.block_size)
    if not load.takes(num_tokens, seq.lane):
        beside = load.competing_tokens(num_tokens, seq.lane)
        raise TandemError(
            ErrorKind.OVERLOADED,
            f"{beside} tokens of prompts would be queued beside the longest, {load.num_horizon_tokens} may be",
            retry_after_s=1.0,
        )


def horizon_tokens(limits: SchedulerLimits, cost: StepCost) -> int:
    """Convert `limits.queue_horizon_s` to a number of prefill tokens, at the speed that `cost` predicts for a full
    step.

    Returns 0 if the limit is None, which means no limit, and the tokens of HORIZON_STEPS full steps if it is 0 seconds.
    """
    horizon_s, step_tokens = limits.queue_horizon_s, limits.max_num_batched_tokens
    if horizon_s is None:
        return 0
    if horizon_s == 0:
        return HORIZON_STEPS * step_tokens
    step_s = cost.predict(StepFeatures(step_tokens, num_prefill_pairs=step_tokens * (step_tokens + 1) // 2))
    return max(1, int(step_tokens * horizon_s / step_s)) if step_s > 0 else HORIZON_STEPS * step_tokens
