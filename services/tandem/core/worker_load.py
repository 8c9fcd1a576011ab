"""What a worker says of how full it is; never computed here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.lane import Lane

PROMPT_SIZES = (256, 1024, 4096, 16384)
"""Tokens to compute of the largest prompt of each size but the last, which has no bound. Shorter prompts go ahead
(`sched.share`), so what a prompt waits for are those of its size and below."""


def prompt_size(num_tokens: int) -> int:
    return bisect_left(PROMPT_SIZES, num_tokens)


def no_larger(num_tokens: int, lane: Lane, by_lane: Sequence[int], by_size: Sequence[int]) -> int:
    """Return what counts for a prompt of this size and lane, of `WorkerLoad.lane_tokens` and `size_tokens` or of
    `lane_longest` and `size_longest`."""
    size = prompt_size(num_tokens)
    return by_size[lane * len(PROMPT_SIZES) + size] if by_size and size < len(PROMPT_SIZES) else by_lane[lane]


HORIZON_STEPS = 2
"""While one step runs the next is filled from what is here, and the gateways have that long to send more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a router needs. `num_free_blocks` counts blocks without a holder, cached ones included.

    `num_queued_tokens`: known tokens accepted and not computed yet. `num_drafted_tokens` were guessed and
    `num_accepted_tokens` of them guessed right, since the start. `num_steps_over_target`: steps since the start that
    could not be planned to end within the latency target of those they decode for. `num_remote_hit_tokens`: whose KV
    was read from other workers' prefix caches, since the start. `num_prefill_tokens` and `num_decode_tokens` are what
    its steps were made of since the start; that alone is no news to anybody, so it rides on what is.

    `lane_tokens`: of the queued tokens those of each lane and all more urgent ones, `lane_longest` as many of them as
    the longest prompt has. `size_tokens` and `size_longest` say the same of prompts of at most PROMPT_SIZES[0] tokens,
    [1], and so on, lane by lane; empty: not told. Beside the longest of its size a worker takes on `num_horizon_tokens`
    of prompts no larger; 0: any number.

    `number` rises with every change in a worker's life: reports come by several ways, and the greatest is the newest.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_leased_blocks: int = 0
    num_reserved_blocks: int = 0
    draining: bool = False
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps_over_target: int = 0
    num_remote_hit_tokens: int = 0
    lane_tokens: tuple[int, ...] = ()
    lane_longest: tuple[int, ...] = ()
    size_tokens: tuple[int, ...] = ()
    size_longest: tuple[int, ...] = ()
    num_horizon_tokens: int = 0
    num_prefill_tokens: int = field(default=0, compare=False)
    num_decode_tokens: int = field(default=0, compare=False)
    number: int = field(default=0, compare=False)

    def takes(self, num_tokens: int, lane: Lane, coming: Sequence[int] = ()) -> bool:
        """Whether a prompt of so many tokens to compute may be accepted now, after those `coming`."""
        if not self.num_horizon_tokens or not self.lane_tokens:
            return True
        return self.beside(num_tokens, lane, coming) <= self.num_horizon_tokens

    def beside(self, num_tokens: int, lane: Lane, coming: Sequence[int] = ()) -> int:
        """Tokens that it would have to compute beside the longest, of the newcomer, those `coming` and what it has
        queued in this lane and above, without prompts of a larger size."""
        coming = [each for each in coming if prompt_size(each) <= prompt_size(num_tokens)]
        num_queued = no_larger(num_tokens, lane, self.lane_tokens, self.size_tokens) + sum(coming)
        longest = max(no_larger(num_tokens, lane, self.lane_longest, self.size_longest), *coming, 0)
        return num_competing_tokens(num_tokens, num_queued, longest)

    def may_take_more_than(self, before: WorkerLoad) -> bool:
        """Whether there may be room for what had none before."""
        return (
            self.num_running < before.num_running
            or self.num_waiting < before.num_waiting
            or self.num_queued_tokens < before.num_queued_tokens
            or self.num_horizon_tokens > before.num_horizon_tokens
            or self.num_free_blocks > before.num_free_blocks
            or self.num_leased_blocks < before.num_leased_blocks
            or self.num_reserved_blocks < before.num_reserved_blocks
            or self.num_blocks > before.num_blocks
            or self.draining < before.draining
        )


def num_competing_tokens(num_tokens: int, num_queued: int, num_longest: int) -> int:
    """What a worker would have to compute beside its longest prompt, with one of `num_tokens` beside the queued. One
    long prompt must not keep shorter ones of its size out; so one alone is always taken."""
    return num_queued + num_tokens - max(num_longest, num_tokens)


@dataclass(frozen=True, slots=True)
class DrainResult:
    """Progress of a drain.

    `num_left`: jobs and leases that are left. `num_migrated`: choices that went on at other workers with their KV.
    `num_requeued`: choices that failed as DRAINING, to be computed anew by another worker.
    """

    num_left: int
    num_migrated: int = 0
    num_requeued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Every count of a worker's books; when idle all are zero but the first three and `num_host_blocks`, which only
    host memory holds and a prefix hit brings back."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_table_blocks: int = 0
    num_leased_blocks: int = 0
    num_reading_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_sequences: int = 0
    num_leases: int = 0
    num_pulls: int = 0
    num_host_blocks: int = 0
