"""What a worker says of how full it is; never computed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.lane import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a router needs. `num_free_blocks` counts blocks without a holder, cached ones included.

    `num_queued_tokens`: known tokens accepted and not computed yet. `num_drafted_tokens` were guessed and
    `num_accepted_tokens` of them guessed right, since the start. `num_steps_over_target`: steps since the start that
    could not be planned to end within the latency target of those they decode for.

    `lane_tokens`: of the queued tokens those of each lane and all more urgent ones, `lane_longest` as many of them as
    the longest prompt has. Beside the longest prompt a worker takes on `num_horizon_tokens`; 0: any number.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_leased_blocks: int = 0
    num_promised_blocks: int = 0
    draining: bool = False
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps_over_target: int = 0
    lane_tokens: tuple[int, ...] = ()
    lane_longest: tuple[int, ...] = ()
    num_horizon_tokens: int = 0

    def takes(self, num_tokens: int, lane: Lane, coming: Sequence[int] = ()) -> bool:
        """Whether a prompt of so many tokens to compute may be accepted now, after those `coming`."""
        if not self.num_horizon_tokens or not self.lane_tokens:
            return True
        longest = max(self.lane_longest[lane], *coming, 0)
        beside = beside_longest(num_tokens, self.lane_tokens[lane] + sum(coming), longest)
        return beside <= self.num_horizon_tokens

    def may_take_more_than(self, before: Load) -> bool:
        """Whether there may be room for what had none before."""
        return (
            self.num_running < before.num_running
            or self.num_waiting < before.num_waiting
            or self.num_queued_tokens < before.num_queued_tokens
            or self.num_horizon_tokens > before.num_horizon_tokens
            or self.num_free_blocks > before.num_free_blocks
            or self.num_leased_blocks < before.num_leased_blocks
            or self.num_promised_blocks < before.num_promised_blocks
            or self.num_blocks > before.num_blocks
            or self.draining < before.draining
        )


def beside_longest(num_tokens: int, num_queued: int, num_longest: int) -> int:
    """What a worker would have to compute beside its longest prompt, with one of `num_tokens` beside the queued. One
    long prompt must not keep short ones out, which go ahead of it (`sched.share`); so one alone is always taken."""
    return num_queued + num_tokens - max(num_longest, num_tokens)


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of a drain: jobs and leases that are left, choices that went on elsewhere with their KV, and choices
    that were given back, to be computed anew."""

    num_left: int
    num_moved: int = 0
    num_given_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Every count of a worker's books; when idle all are zero but the first three."""

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
