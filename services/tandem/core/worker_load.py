"""Define the load report of a worker (`WorkerLoad`), and compute from it whether the worker would accept another
prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.lane import Lane

PROMPT_SIZES = (256, 1024, 4096, 16384)
"""Upper bounds of the prompt size classes, in tokens to compute; one more class has no bound. Shorter prompts are
computed first (`sched.prefill_sharing`), so a prompt waits only for prompts of its class and smaller ones."""


def prompt_size(num_tokens: int) -> int:
    """Return the size class of a prompt of `num_tokens` tokens: the index of its upper bound in PROMPT_SIZES."""
    return bisect_left(PROMPT_SIZES, num_tokens)


def no_larger(num_tokens: int, lane: Lane, by_lane: Sequence[int], by_size: Sequence[int]) -> int:
    """Return the entry of a load report for the prompts that compete with a prompt of `num_tokens` tokens in `lane`:
    those of this lane and more urgent ones that are in its size class or a smaller one.

    It is the entry of `by_size` for the lane and size class. Where `by_size` is empty, or the prompt is in the largest
    class, it is the entry of `by_lane` for the lane. As `by_lane` and `by_size`, pass `lane_tokens` and `size_tokens`
    of a `WorkerLoad`, or `lane_longest` and `size_longest`.
    """
    size = prompt_size(num_tokens)
    return by_size[lane * len(PROMPT_SIZES) + size] if by_size and size < len(PROMPT_SIZES) else by_lane[lane]


HORIZON_STEPS = 2
"""Number of full steps whose prompt tokens a worker accepts ahead: while one step runs, the next is filled from the
queue, and gateways have the time of a step to send more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load report that a worker sends to gateways, for routing. An empty tuple means: not reported.

    Sequences and blocks:
    - `num_running`: sequences that hold KV blocks, because they are computed or their KV is being pulled;
      `num_waiting`: sequences that hold none. `num_queued_tokens`: tokens of accepted prompts that are not computed
      yet.
    - `num_blocks`: KV blocks of the pool; `num_free_blocks`: blocks without a holder, cached blocks included;
      `num_leased_blocks`: blocks that other workers may read; `num_reserved_blocks`: blocks reserved for KV that will
      be read from other workers.
    - `num_host_blocks`: blocks that are only in host memory, from which a prefix-cache hit loads them. If nothing but
      this number changes, no new report is sent.
    - `draining`: whether the worker drains, and accepts no new jobs.

    For each lane, in the order of `Lane`:
    - `lane_tokens`: queued tokens of this lane and all more urgent ones; `lane_longest`: tokens of the longest prompt
      among them.
    - `size_tokens`, `size_longest`: the same, counting only prompts of at most `PROMPT_SIZES[i]` tokens, for each lane
      and each i in one flat tuple: the entries of the first lane by rising i, then those of the next.
    - `lane_seqs`: seats of sequences that run, whose KV is being pulled, or that have a reservation; a sequence that
      still stands for several choices counts as many seats as these choices will take. `lane_blocks`: blocks that the
      same sequences hold or have reserved, shared blocks once per sequence.
    - `lane_paused`: sequences that had begun and now wait to go on: preempted ones, and choices without a seat.

    Counters since the start of the worker:
    - `num_drafted_tokens`, `num_accepted_tokens`: draft tokens of speculative decoding, and how many of them were
      right.
    - `num_steps_over_target`: steps that could not be planned to end within the latency target of the sequences they
      decode.
    - `num_remote_hit_tokens`: tokens whose KV was read from other workers' prefix caches.
    - `num_prefill_tokens`, `num_decode_tokens`: tokens of all steps. If nothing but these numbers changes, no new
      report is sent.

    For admission and ordering:
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
        """Return whether the worker would accept a prompt of `num_tokens` uncached tokens in `lane` now.

        `inflight`: the numbers of uncached tokens of prompts that were sent to the worker and are not in this report
        yet.
        """
        if not self.num_horizon_tokens or not self.lane_tokens:
            return True
        return self.competing_tokens(num_tokens, lane, inflight) <= self.num_horizon_tokens

    def competing_tokens(self, num_tokens: int, lane: Lane, inflight: Sequence[int] = ()) -> int:
        """Return how many tokens would count against the queue limit `num_horizon_tokens` if the worker accepted a
        prompt of `num_tokens` tokens in `lane`.

        Counted are the new prompt, the queued prompts in this lane and more urgent ones, and the `inflight` prompts
        (numbers of tokens of prompts that were sent and are not in the report yet). Prompts of a larger size class than
        the new one do not count. Nor does the longest of the counted prompts, which may be the new one, so that a
        single long prompt neither keeps shorter prompts of its class out nor is itself refused.
        """
        inflight = [size for size in inflight if prompt_size(size) <= prompt_size(num_tokens)]
        num_queued = no_larger(num_tokens, lane, self.lane_tokens, self.size_tokens) + sum(inflight)
        longest = max(no_larger(num_tokens, lane, self.lane_longest, self.size_longest), *inflight, 0)
        return num_queued + num_tokens - max(longest, num_tokens)

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


@dataclass(frozen=True, slots=True)
class DrainResult:
    """Report the progress of the drain of one worker.

    `num_left`: choices and leases that must still end. `num_migrated`: choices that were migrated with their KV and
    went on at other workers. `num_requeued`: choices that failed with the kind DRAINING, so that another worker
    computes them anew. `is_undone`: the drain was undone before it was complete.
    """

    num_left: int
    num_migrated: int = 0
    num_requeued: int = 0
    is_undone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Numbers of blocks, sequences, leases and pulls of a worker's engine, for metrics and for checks against leaks.

    Zero when the engine is idle, else something leaks:
    - `num_table_blocks`: blocks of sequences, once per sequence; `num_leased_blocks`: blocks that other workers may
      read; `num_reading_blocks`: blocks into which KV is being read; `num_quarantined_blocks`: blocks held because a
      failed read may still write to them.
    - `num_sequences`, `num_leases`, `num_pulls`: sequences, leases and pulls that the engine still holds.

    Not zero when the engine is idle:
    - `num_blocks`: blocks of the pool; `num_free_blocks`: blocks without a holder; `num_cached_blocks`: free blocks
      that a prefix-cache hit can reuse; `num_retained_blocks`: cached blocks that are evicted last, because requests
      retain them.
    - `num_host_blocks`: blocks that are only in host memory, from which a prefix-cache hit loads them;
      `num_file_blocks`: blocks that are stored in files; `num_file_hit_tokens`: tokens whose KV was read from files
      since the start.
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
