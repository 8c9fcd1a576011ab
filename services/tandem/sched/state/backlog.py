"""What a worker has accepted of prompts and not computed, and how much it takes on, as functions; never keeps a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.core.worker_load import HORIZON_STEPS, PROMPT_SIZES, no_larger, num_competing_tokens, prompt_size
from tandem.kv.block_pool import BlockPool
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.sequence import Sequence, Status

NUM_SIZES = len(PROMPT_SIZES) + 1
NO_LANES = (0,) * len(Lane)
NO_SIZES = (0,) * (len(Lane) * len(PROMPT_SIZES))


@dataclass(frozen=True, slots=True)
class Backlog:
    """`tokens` and `longest` by lane, as `lane_tokens` and `lane_longest` of `core.load.Load`; by lane and size, as
    `size_tokens` and `size_longest`."""

    tokens: tuple[int, ...]
    longest: tuple[int, ...]
    size_tokens: tuple[int, ...]
    size_longest: tuple[int, ...]
    num_horizon_tokens: int


def num_queued(seq: Sequence, block_size: int) -> int:
    """Known tokens whose KV is neither computed nor planned nor likely in the prefix cache, now or once what it awaits
    was read, of a sequence that is computed here and is more than a decode."""
    if not (seq.may_start or seq.num_remote_prefix_blocks) or seq.num_remaining <= 1:
        return 0
    hits = max(seq.num_hits_seen, seq.num_remote_prefix_blocks) * block_size if seq.status is Status.WAITING else 0
    return max(1, seq.num_remaining - hits)


def backlog(seqs: Iterable[Sequence], block_size: int, num_horizon_tokens: int) -> Backlog:
    """Asked for after every step, when most often nothing is queued."""
    queued = [(seq.lane, num) for seq in seqs if (num := num_queued(seq, block_size))]
    if not queued:
        return Backlog(NO_LANES, NO_LANES, NO_SIZES, NO_SIZES, num_horizon_tokens)
    tokens, longest = [[0] * NUM_SIZES for _ in Lane], [[0] * NUM_SIZES for _ in Lane]
    for lane, num in queued:
        size = prompt_size(num)
        tokens[lane][size] += num
        longest[lane][size] = max(longest[lane][size], num)
    size_tokens, lane_tokens = _added_up(tokens, add)
    size_longest, lane_longest = _added_up(longest, max)
    return Backlog(lane_tokens, lane_longest, size_tokens, size_longest, num_horizon_tokens)


def _added_up(rows: list[list[int]], join: Callable[[int, int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of figures by lane and size: over all lanes and sizes up to each, for every size but the last, and for that."""
    above, by_size, by_lane = [0] * len(rows[0]), list[int](), list[int]()
    for row in rows:
        above = list(map(join, above, row))
        *parts, whole = accumulate(above, join)
        by_size += parts
        by_lane.append(whole)
    return tuple(by_size), tuple(by_lane)


def check_backlog(seq: Sequence, pool: BlockPool, held: Backlog) -> None:
    """Raises TandemError when a sequence that comes must wait in its gateway. Prefix hits are not to be computed."""
    seq.num_hits_seen = pool.count_hits(seq.reusable(pool.block_size))
    num_tokens = num_queued(seq, pool.block_size)
    tokens = no_larger(num_tokens, seq.lane, held.tokens, held.size_tokens)
    longest = no_larger(num_tokens, seq.lane, held.longest, held.size_longest)
    beside = num_competing_tokens(num_tokens, tokens, longest)
    if 0 < held.num_horizon_tokens < beside:
        raise TandemError(
            ErrorKind.OVERLOADED,
            f"{beside} tokens of prompts would be queued beside the longest, {held.num_horizon_tokens} may be",
            retry_after_s=1.0,
        )


def horizon_tokens(limits: SchedulerLimits, cost: StepCost) -> int:
    """What is taken on beside the longest prompt; 0: any."""
    horizon_s, step_tokens = limits.queue_horizon_s, limits.max_num_batched_tokens
    if horizon_s is None:
        return 0
    if horizon_s == 0:
        return HORIZON_STEPS * step_tokens
    step_s = cost.predict(StepFeatures(step_tokens, num_prefill_pairs=step_tokens * (step_tokens + 1) // 2))
    return max(1, int(step_tokens * horizon_s / step_s)) if step_s > 0 else HORIZON_STEPS * step_tokens
