"""Define the frozen values that the scheduler returns to the engine from `plan` and `commit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, Preempted, Preemption, SampledToken
from tandem.core.ids import BlockId, JobKey
from tandem.core.request import Job
from tandem.core.request_stages import WaitCause
from tandem.core.step_cost import StepFeatures
from tandem.kv.block_pool import BlockTable
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.step_plan import StepPlan


class WaitSpan(NamedTuple):
    """Hold the time from `since` to `until`, in seconds of the caller's clock, for which a sequence waited for `cause`.

    `num_tokens_ahead`: if `cause` is PROMPTS_AHEAD, the number of prompt tokens that were to be computed before the
    sequence when it arrived; else 0.
    """

    cause: WaitCause
    since: float
    until: float
    num_tokens_ahead: int = 0


@dataclass(frozen=True, slots=True)
class PullAllocated:
    """Report that a `ResumeJob` got the KV blocks into which its KV is to be pulled.

    - `key`: the first choice of the job.
    - `table`: these blocks. Until the KV has arrived, only the pull changes the table.
    - `num_hit_blocks`: number of leading blocks that hold their content already (prefix-cache hits), or will hold it
      once the open plans have copied it from host memory.
    - `num_known_blocks`: number of leading blocks for tokens that are known. Of these, all after the first
      `num_hit_blocks` are to be read from the producer. The blocks after them are for tokens still to be sampled.
    - `waits`: what the pull has waited for since its producer was ready, as far as known.

    The open plans may still copy the old content of some of these blocks to host memory. Until then nothing may be
    written to such a block, see `BlockPool.is_copied`.
    """

    key: JobKey
    table: BlockTable
    num_hit_blocks: int
    num_known_blocks: int
    waits: tuple[WaitSpan, ...] = ()


class SequenceStarted(NamedTuple):
    """Report that a waiting sequence got its first blocks, and that this worker computes it from now on.

    - `key`: the first choice of the job.
    - `num_cached`: number of tokens that were prefix-cache hits when the sequence was started for the first time. When
      a preempted sequence is started again, the number is the same as before.
    - `leased`: for a `PrefillJob`, the ids of all blocks of the sequence, which the pool also holds for the lease from
      now on; empty for other jobs.
    - `waits`: what the sequence has waited for since its arrival, as far as known; empty where it is started again.
    """

    key: JobKey
    num_cached: int
    leased: tuple[BlockId, ...] = ()
    waits: tuple[WaitSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Hold what one call of `Scheduler.plan` decided.

    - `step`: the plan to compute; None when there is nothing to compute.
    - `pulls`: the pulls that got blocks; `starts`: the sequences that this worker begins to compute.
    - `num_preempted`: number of sequences that were preempted because no block was free; `num_yielded`: number of
      sequences that were preempted so that sequences of more urgent lanes get their seats and blocks. Both wait to be
      computed again. `preempted`: one entry for each sequence of both kinds that has output tokens already.
    - `chunks`: pairs (first choice of a sequence, number of its known tokens that the step computes). A single known
      token from which a new one is sampled counts as a decode and is not listed.
    """

    step: StepPlan | None
    pulls: tuple[PullAllocated, ...] = ()
    num_preempted: int = 0
    num_yielded: int = 0
    starts: tuple[SequenceStarted, ...] = ()
    chunks: tuple[tuple[JobKey, int], ...] = ()
    preempted: tuple[Preempted, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Hold the predicted and the measured time of one executed step, and what determined them.

    - `number`: number of the step's plan; `features`: the work from which the time of the step was predicted.
    - `predicted_s`, `measured_s`: predicted and measured seconds from the start of planning to the delivery of the
      results.
    - `target_s`: the strictest ITL target, in seconds, of the sequences that decoded; 0: no target.
    - `num_budget_tokens`: the most prompt tokens that the step was allowed to compute.
    - `num_preempted`, `num_yielded`: as in `ScheduleResult`, added up over the calls of `Scheduler.plan` after the call
      that made the previous step, up to the call that made this one. `has_failed`: whether a slice of the step failed.
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
        """Return whether the step was predicted to exceed its latency target. Such a step is planned only where even
        the smallest step would exceed it."""
        return 0 < self.target_s < self.predicted_s


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """Report what a committed step changed for one sequence, and the state of the sequence after it.

    - `job`: the job of the sequence. `num_computed`: number of tokens with complete KV. `num_cached`: number of tokens
      found in the prefix cache when the prompt was started, on the worker that computed it.
    - `tokens`: newly sampled tokens, from output position `first_index` on; `scores`: log probabilities of prompt
      tokens, from prompt position `first_scored` on; `digests`: checksums of blocks that became complete.
    - The sequence has ended on this worker if one of these is set: `finish` (it is complete), `handed_over` (another
      worker continues it), `error` (it failed, with kind `error_kind`).
    - `first_tokens`: the tokens that a prefill hands over, one per choice of its job; empty in all other updates.
    - `preemption`: pauses of the sequence since its last update with tokens, and other sequences that were preempted in
      this time to make room for it; None where there were none.
    - `branches`: for a job of several choices, one update per choice. It is set only for the step that samples the
      first tokens of the choices, or in which they end without any; it has the token and the end of each choice. This
      update itself then has no `tokens`, and has `finish` only if all choices have finished. In all other updates
      `branches` is empty: before this step one sequence stands for all choices, and after it each choice has its own.
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
