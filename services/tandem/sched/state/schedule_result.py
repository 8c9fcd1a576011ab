"""Define the frozen values that the scheduler returns to the engine from `plan` and `commit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, Preemption, SampledToken
from tandem.core.ids import BlockId, JobKey
from tandem.core.request import Job
from tandem.core.request_stages import WaitCause
from tandem.core.step_cost import StepFeatures
from tandem.kv.block_pool import BlockTable
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.step_plan import StepPlan


class WaitSpan(NamedTuple):
    """Time, in seconds of the caller's clock, for which a sequence waited for one cause.

    `num_tokens_ahead` is as in `Wait`.
    """

    cause: WaitCause
    since: float
    until: float
    num_tokens_ahead: int = 0


@dataclass(frozen=True, slots=True)
class PullAllocated:
    """Report that the pull of a `ResumeJob` got blocks, those of `table`, which nothing but the pull changes until its
    KV has arrived.

    The first `num_hit_blocks` hold their content already (prefix-cache hits), or will once the open plans have copied
    it from host memory. Blocks `[num_hit_blocks, num_known_blocks)` are to be read from the producer, and the rest is
    for tokens still to be sampled. The open plans may still copy the old content of blocks to host memory; until then
    nothing may be written to these blocks, see `BlockPool.is_copied`. `key`: the first choice of the job. `waits`: what
    it waited for since its producer was ready, as far as known.
    """

    key: JobKey
    table: BlockTable
    num_hit_blocks: int
    num_known_blocks: int
    waits: tuple[WaitSpan, ...] = ()


class PreemptedChoice(NamedTuple):
    """Report that the sequence of a choice that has `num_output` tokens was preempted."""

    key: JobKey
    num_output: int


class SequenceStarted(NamedTuple):
    """Report that a waiting sequence got its first blocks, and that this worker computes it from now on.

    - `key`: the first choice of its job.
    - `num_cached`: its tokens that were prefix-cache hits when it was first started; a preempted sequence is started
      again.
    - `leased`: for a `PrefillJob`, all its blocks, which the pool now also holds for the lease; empty for other jobs.
    - `waits`: what it waited for since its arrival, as far as known; empty where it is started again.
    """

    key: JobKey
    num_cached: int
    leased: tuple[BlockId, ...] = ()
    waits: tuple[WaitSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """What one call of `Scheduler.plan` decided.

    - `step`: the plan to compute; None when there is nothing to compute.
    - `pulls`: the pulls that got blocks; `starts`: the sequences that this worker begins to compute.
    - `num_preempted`: sequences that lost their blocks because none was free, and `num_yielded`: those that yielded to
      more urgent lanes; both wait to be computed again. `preempted`: the choices among them that have output tokens.
    - `chunks`: (sequence, number of known tokens that the step computes). A single known token from which a new one is
      sampled counts as a decode and is not listed.
    """

    step: StepPlan | None
    pulls: tuple[PullAllocated, ...] = ()
    num_preempted: int = 0
    num_yielded: int = 0
    starts: tuple[SequenceStarted, ...] = ()
    chunks: tuple[tuple[JobKey, int], ...] = ()
    preempted: tuple[PreemptedChoice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Prediction and measurement of one executed step.

    - `number`: that of the step's plan; `features`: the work from which its time was predicted.
    - `predicted_s`, `measured_s`: seconds from the start of planning to the delivery of the results.
    - `target_s`: the strictest ITL target, in seconds, of the sequences that decoded; 0: none.
    - `num_budget_tokens`: the prompt tokens that the step was allowed to compute.
    - `num_preempted`, `num_yielded`: as in `ScheduleResult`, with those of plans since the step before it that had no
      step; `has_failed`: a slice of it failed.
    - `num_drafted`: draft tokens of speculative decoding in the step, which `features` counts as prefill tokens.
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
    num_yielded: int = 0

    @property
    def is_planned_over_target(self) -> bool:
        """Return whether the step was predicted to exceed its latency target, because even the smallest step would
        have.
        """
        return 0 < self.target_s < self.predicted_s


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a committed step changed for one sequence, and the state of the sequence after it.

    - `num_computed`: tokens with complete KV; `num_cached`: tokens found in the prefix cache when the prompt was
      started, on the worker that computed it.
    - `tokens`: newly sampled tokens, from output position `first_index` on; `scores`: log probabilities of prompt
      tokens, from prompt position `first_scored` on; `digests`: checksums of blocks that became complete.
    - The sequence has ended on this worker if one of these is set: `finish` (it is complete), `handed_over` (another
      worker continues it), `error` (it failed, with kind `error_kind`).
    - `first_tokens`: the tokens that a prefill hands over, one per choice of its job.
    - `preemption`: what it did to the sequence since its last update with tokens; None where that is nothing.
    - `branches`: one update per choice of a job of several choices, in the step that samples their first tokens or in
      which they end without any; empty in all other steps. Until then one sequence stands for all choices. A branch has
      the token and the end of its choice; `tokens` of the update itself is then empty, and its `finish` is set only if
      all choices have finished.
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
    preemption: Preemption | None = None

    @property
    def parts(self) -> tuple[SequenceUpdate, ...]:
        """Return one update per choice: `branches`, or only this update where `branches` is empty."""
        return self.branches or (self,)

    @property
    def key(self) -> JobKey:
        return self.job.key

    @property
    def num_output(self) -> int:
        """Return the number of output tokens after this update."""
        return self.first_index + len(self.tokens)

    @property
    def has_ended(self) -> bool:
        """Return whether the sequence has ended on this worker: it is complete, was handed over, or has failed."""
        return self.finish is not None or self.handed_over or self.error is not None
