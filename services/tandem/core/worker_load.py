"""Define the load report of a worker (`WorkerLoad`), and compute from it whether the worker would accept another
prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.lane import Lane

PROMPT_SIZES = (256, 1024, 4096, 16384)
"""Upper bounds of the prompt size classes, in tokens to compute; the last class has none. Shorter prompts are computed
first (`sched.prefill_sharing`), so a prompt waits only for prompts of its class and below."""


def prompt_size(num_tokens: int) -> int:
    """Return the size class of a prompt of `num_tokens` tokens: the index of its upper bound in PROMPT_SIZES."""
    return bisect_left(PROMPT_SIZES, num_tokens)


def no_larger(num_tokens: int, lane: Lane, by_lane: Sequence[int], by_size: Sequence[int]) -> int:
    """Select the figure of a load report that covers the prompts competing with a prompt of `num_tokens` tokens in
    `lane`.

    That is the entry of `by_size` for the lane and the prompt's size class; where `by_size` is empty, or the prompt is
    in the largest class, it is the entry of `by_lane` for the lane. Pass `lane_tokens` and `size_tokens` of a
    `WorkerLoad`, or `lane_longest` and `size_longest`.
    """
    size = prompt_size(num_tokens)
    return by_size[lane * len(PROMPT_SIZES) + size] if by_size and size < len(PROMPT_SIZES) else by_lane[lane]


HORIZON_STEPS = 2
"""Steps of prompt tokens that a worker accepts ahead: while one step runs the next is filled from the queue, and
gateways have that long to send more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load report that a worker sends to gateways, for routing.

    - `num_running`, `num_waiting`: sequences with and without KV blocks. `num_queued_tokens`: tokens of accepted
      prompts that are not computed yet.
    - `num_free_blocks`: KV blocks without a holder, cached blocks included; `num_leased_blocks`: blocks that other
      workers may read; `num_reserved_blocks`: blocks kept free for KV that will be read from other workers.
    - `num_drafted_tokens`, `num_accepted_tokens`: speculated tokens, and how many of them were right, since the start
      of the worker, as all further counters. `num_steps_over_target`: steps that could not be planned to end within the
      latency target of the sequences they decode. `num_remote_hit_tokens`: tokens whose KV was read from other workers'
      prefix caches. `num_prefill_tokens`, `num_decode_tokens`: tokens of all steps; a change of these two alone causes
      no report.
    - `lane_tokens`: for each lane the queued tokens of this lane and all more urgent ones; `lane_longest`: the tokens
      of the longest prompt among them. `size_tokens`, `size_longest`: the same counts, lane by lane, over the prompts
      of at most PROMPT_SIZES[0] tokens, at most PROMPT_SIZES[1], and so on; empty: not reported.
    - `lane_seqs`: for each lane the seats of sequences that run, whose KV is being pulled, or that have a reservation;
      `lane_blocks`: the blocks that these hold or have reserved, shared ones counted once per sequence. A sequence that
      stands for several choices has the seats of these. Empty: not reported.
    - `lane_paused`: for each lane the waiting sequences that have begun: preempted ones, and choices without a seat.
      Empty: not reported.
    - `num_host_blocks`: blocks that are only in host memory, from which a prefix-cache hit loads them; a change of it
      alone causes no report.
    - `num_horizon_tokens`: limit on queued prompt tokens, above which the worker rejects a prompt; 0: no limit. Which
      tokens count is defined in `competing_tokens`.
    - `number`: rises with every change while the worker lives. Reports arrive over several streams, and the one with
      the greatest number is the newest.
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
    lane_seqs: tuple[int, ...] = ()
    lane_blocks: tuple[int, ...] = ()
    lane_paused: tuple[int, ...] = ()
    num_horizon_tokens: int = 0
    num_prefill_tokens: int = field(default=0, compare=False)
    num_decode_tokens: int = field(default=0, compare=False)
    num_host_blocks: int = field(default=0, compare=False)
    number: int = field(default=0, compare=False)

    def takes(self, num_tokens: int, lane: Lane, inflight: Sequence[int] = ()) -> bool:
        """Return whether the worker would accept a prompt of `num_tokens` uncached tokens now.

        `inflight`: the sizes of prompts that were sent to it and that its report does not contain yet.
        """
        if not self.num_horizon_tokens or not self.lane_tokens:
            return True
        return self.competing_tokens(num_tokens, lane, inflight) <= self.num_horizon_tokens

    def competing_tokens(self, num_tokens: int, lane: Lane, inflight: Sequence[int] = ()) -> int:
        """Return how many tokens would count against the queue limit `num_horizon_tokens` if the worker accepted a
        prompt of `num_tokens` tokens.

        Counted are the new prompt, the `inflight` prompts (sent and not in the report yet), and the queued prompts in
        this lane and more urgent ones. Prompts of a larger size class and the longest of all these prompts do not
        count.
        """
        inflight = [size for size in inflight if prompt_size(size) <= prompt_size(num_tokens)]
        num_queued = no_larger(num_tokens, lane, self.lane_tokens, self.size_tokens) + sum(inflight)
        longest = max(no_larger(num_tokens, lane, self.lane_longest, self.size_longest), *inflight, 0)
        return num_competing_tokens(num_tokens, num_queued, longest)

    def may_take_more_than(self, before: WorkerLoad) -> bool:
        """Return whether the worker may now accept a prompt that it rejected when its report was `before`, so that a
        retry is worthwhile."""
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
    """Return how many tokens count against a worker's queue limit (`num_horizon_tokens`) once it accepts a prompt of
    `num_tokens` tokens.

    `num_queued`: tokens queued before; `num_longest`: those of the longest queued prompt. The longest prompt does not
    count, so that a single long prompt neither keeps shorter prompts of its class out nor is itself refused.
    """
    return num_queued + num_tokens - max(num_longest, num_tokens)


@dataclass(frozen=True, slots=True)
class DrainResult:
    """Progress of the drain of one worker.

    `num_left`: choices and leases that are left. `num_migrated`: choices that went on at other workers with their KV.
    `num_requeued`: choices that failed as DRAINING, to be computed anew by another worker.
    """

    num_left: int
    num_migrated: int = 0
    num_requeued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Numbers of blocks, sequences, leases and pulls that a worker's engine holds, for metrics and for checks against
    leaks.

    When the engine is idle, all are zero except `num_blocks`, `num_free_blocks`, `num_cached_blocks`, of which
    `num_retained_blocks` are evicted last, `num_host_blocks`, the blocks that are only in host memory, from which a
    prefix-cache hit loads them, `num_file_blocks`, the blocks that files hold, and `num_file_hit_tokens`, the tokens
    whose KV was read from files since the start.
    `num_table_blocks`: blocks of sequences, once per sequence; `num_reading_blocks`: blocks into which KV is being
    read; `num_quarantined_blocks`: blocks held because a failed read may still write.
    """

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
    num_retained_blocks: int = 0
    num_file_blocks: int = 0
    num_file_hit_tokens: int = 0
