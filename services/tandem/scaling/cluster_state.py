"""What one decision is made from, as plain frozen values; never measures and never decides."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from tandem.core.step_cost import StepCost

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What came and what was served of one model in an interval of `seconds`, at all gateways together.

    `num_requests` and `num_input_tokens` count as requests come. All else counts later, and is read by the `num_served`
    that had a first token, because what was refused tells nothing of how long answers are (None: nobody counts them,
    and it is read by those that came): `num_cached_tokens` of inputs that prefix caches had,
    `num_prefill_pairs`, the sum over prompts of (token computed, token it attends to) pairs as of `StepFeatures` (None:
    nobody counts them), `num_late_ttft` requests whose first token came after its target, `num_late_itl` that had more
    late gaps than a good one may (`Slo.is_met`; None: nobody counts them), `num_late_gaps` of `num_gaps` between two
    tokens, and `num_failed` requests for which the cluster had no room.
    """

    seconds: float
    num_requests: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_prefill_pairs: int | None = None
    num_served: int | None = None
    num_late_ttft: int = 0
    num_late_itl: int | None = None
    num_late_gaps: int = 0
    num_gaps: int = 0
    num_failed: int = 0

    def __add__(self, other: Demand) -> Demand:
        """Of two intervals, one after the other; pairs that one of them does not know are not known of both."""
        sums: dict[str, Any] = {}
        for one in fields(Demand):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            sums[one.name] = None if mine is None or theirs is None else mine + theirs
        return Demand(**sums)


@dataclass(frozen=True, slots=True)
class PoolState:
    """Workers of one role by what they do: those that take requests, those that will soon, those that finish what they
    have and then end."""

    num_serving: int = 0
    num_starting: int = 0
    num_draining: int = 0

    @property
    def num_kept(self) -> int:
        """That are there or will be, unless somebody decides otherwise."""
        return self.num_serving + self.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapacity:
    """What one worker of a pool can do: its own measured step times, and its room. `num_blocks` of KV, of `block_size`
    tokens each."""

    cost: StepCost
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The cluster `at` seconds of any clock that does not go back. `demand` since the last observation; None: no
    gateway has told it, and nothing is to be concluded. A capability of None: no worker has told it yet.

    `num_queued_tokens` of prompts that wait to be computed, at gateways and workers; `num_queued_requests` that wait at
    gateways for a place; `num_running_seqs` that decode.
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
