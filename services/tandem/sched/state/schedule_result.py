"""Define the frozen values that the scheduler returns to the engine from `plan` and `commit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import BlockId, JobKey
from tandem.core.request import Job
from tandem.core.step_cost import StepFeatures
from tandem.kv.block_pool import BlockTable
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class PullAllocated:
    """Blocks allocated for the KV pull of a Resume: those of `table`, which only the pull changes until its KV has
    arrived.

    The first `num_hit_blocks` hold their content (prefix-cache hits), or will once the open plans have copied it from
    host memory. Blocks `[num_hit_blocks, num_known_blocks)` are to be read from the producer, and the rest is for
    tokens still to be sampled; the open plans may still copy their old content to host memory, see
    `BlockPool.is_copied`.
    """

    key: JobKey
    table: BlockTable
    num_hit_blocks: int
    num_known_blocks: int


class SequenceStarted(NamedTuple):
    """A sequence that got blocks and is computed on this worker from now on; `num_cached` of its tokens were
    prefix-cache hits. A preempted sequence is started again. `leased`: all blocks of a Prefill, which the pool holds
    for its lease too."""

    key: JobKey
    num_cached: int
    leased: tuple[BlockId, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Everything that one call of `Scheduler.plan` decided.

    `step` is None when there is nothing to compute.
    `chunks` lists the sequences whose known tokens the step computes, with the number of tokens; a single known token
    from which a new one is sampled counts as a decode and is not listed.
    """

    step: StepPlan | None
    pulls: tuple[PullAllocated, ...] = ()
    num_preempted: int = 0
    starts: tuple[SequenceStarted, ...] = ()
    chunks: tuple[tuple[JobKey, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Prediction and measurement of one executed step.

    Times are in seconds, from the start of planning to the delivery of the results. `target_s` is the strictest ITL
    target of the sequences that decoded; 0: none. `num_budget_tokens` is the prefill budget, in tokens at the start of
    a prompt. `num_drafted` speculated tokens are contained in what `features` counts as prefill tokens.
    """

    number: int
    features: StepFeatures
    predicted_s: float
    measured_s: float
    target_s: float
    num_budget_tokens: int
    num_preempted: int
    has_failed: bool
    num_drafted: int = 0

    @property
    def is_planned_over_target(self) -> bool:
        """Return whether even the least work that the step had to do was predicted to take longer than the target."""
        return 0 < self.target_s < self.predicted_s


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """State of one sequence after a commit.

    `tokens` begin at output index `first_index`, `scores` at prompt position `first_scored`. The sequence has ended
    when `finish`, `handed_over` or `error` is set. `num_cached` counts tokens taken from the prefix cache when the
    prompt was started, on the worker that computed it. `first_tokens` are the tokens that a prefill hands over, one per
    choice of its job. A job of several choices has `branches`, one per open choice, from its first sampled tokens (or
    their failure) on; tokens and finish reasons are then those of the branches.
    """

    job: Job
    num_computed: int
    num_cached: int
    first_index: int
    tokens: tuple[SampledToken, ...] = ()
    digests: tuple[BlockDigest, ...] = ()
    finish: FinishReason | None = None
    handed_over: bool = False
    error: str | None = None
    first_scored: int = 0
    scores: tuple[SampledToken, ...] = ()
    first_tokens: tuple[SampledToken, ...] = ()
    branches: tuple[SequenceUpdate, ...] = ()
    error_kind: ErrorKind = ErrorKind.INTERNAL

    @property
    def parts(self) -> tuple[SequenceUpdate, ...]:
        """Return one update per choice: the branches, or this update where there are none."""
        return self.branches or (self,)

    @property
    def key(self) -> JobKey:
        return self.job.key

    @property
    def num_output(self) -> int:
        return self.first_index + len(self.tokens)

    @property
    def has_ended(self) -> bool:
        return self.finish is not None or self.handed_over or self.error is not None
