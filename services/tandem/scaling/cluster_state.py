"""Define the inputs of one scaling decision, as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from tandem.core.step_cost import StepCost

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Counts of one model's requests in an interval of `seconds` seconds, over all gateways.

    - `num_requests`, `num_input_tokens`: requests and their prompt tokens, counted on arrival. All other fields are
      counted later than the arrival.
    - `num_served`: requests that had a first token. Averages of fields that are counted later are over these, because
      rejected requests show nothing about output lengths. None: not counted, and averages are over arrivals.
    - `num_cached_tokens`: input tokens found in prefix caches.
    - `num_prefill_pairs`: sum over prompts of the (token computed, token it attends to) pairs, as in `StepFeatures`.
    - `num_late_ttft`: requests whose first token was after its target. `num_gaps`: times between two consecutive tokens
      of a request; `num_late_gaps`: how many of these exceeded their target.
    - `num_failed`: requests for which the cluster had no capacity.
    """

    seconds: float
    num_requests: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_prefill_pairs: int = 0
    num_served: int | None = None
    num_late_ttft: int = 0
    num_late_gaps: int = 0
    num_gaps: int = 0
    num_failed: int = 0

    def __add__(self, other: Demand) -> Demand:
        """Return the counts of two consecutive intervals together; a field that is None in one of them is None in the
        sum."""
        sums: dict[str, Any] = {}
        for member in fields(Demand):
            own = getattr(self, member.name)
            theirs = getattr(other, member.name)
            sums[member.name] = None if own is None or theirs is None else own + theirs
        return Demand(**sums)


@dataclass(frozen=True, slots=True)
class PoolState:
    """Number of workers of one role by state: serving requests, starting, or draining."""

    num_serving: int = 0
    num_starting: int = 0
    num_draining: int = 0

    @property
    def num_kept(self) -> int:
        """Return the number of workers that serve or start, without those that drain."""
        return self.num_serving + self.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapacity:
    """Describe what one worker of a pool can compute: its measured step times and its limits.

    `cost` predicts the time of a step. The KV pool has `num_blocks` blocks of `block_size` tokens; a step has at most
    `max_num_seqs` sequences and `max_num_batched_tokens` tokens.
    """

    cost: StepCost
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """State of the cluster for one model at the time `at`, in seconds of any monotonic clock: the input of one scaling
    decision.

    - `demand`: what was counted since the last state; None: no gateway has reported, and nothing can be decided.
    - `prefill`, `decode`, `mixed`: the number of workers of each role; `prefill_worker`, `decode_worker`: the capacity
      of one worker of the role, None until a worker has reported it.
    - `num_queued_tokens`: prompt tokens that wait to be computed, at gateways and workers; `num_queued_requests`:
      requests that wait at gateways for a worker; `num_running_seqs`: sequences that decode.
    """

    at: float
    demand: Demand | None
    prefill: PoolState
    decode: PoolState
    mixed: PoolState = PoolState()
    prefill_worker: WorkerCapacity | None = None
    decode_worker: WorkerCapacity | None = None
    num_queued_tokens: int = 0
    num_queued_requests: int = 0
    num_running_seqs: int = 0

    @property
    def has_no_workers(self) -> bool:
        """Return whether no worker of any role serves or starts."""
        return not (self.prefill.num_kept or self.decode.num_kept or self.mixed.num_kept)
