"""What planning and committing tell the engine, all frozen; never an event for a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import BlockId, JobKey
from tandem.core.request import Job
from tandem.core.step_cost import StepFeatures
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.backlog import Backlog
from tandem.sched.state.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class PullAllocated:
    """A Resume got its blocks, in the order of its tokens. The first `num_hit_blocks` hold their content already;
    those in `[num_hit_blocks, num_known_blocks)` are to be read; the rest is for tokens to come."""

    key: JobKey
    blocks: tuple[BlockId, ...]
    num_hit_blocks: int
    num_known_blocks: int


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A Prefill got its blocks; each is held once more, as leased, until the lease book lets it go."""

    key: JobKey
    blocks: tuple[BlockId, ...]


class SequenceStarted(NamedTuple):
    """A sequence got its blocks and is computed here from now on, `num_cached` of its tokens excepted. One that was
    preempted starts again."""

    key: JobKey
    num_cached: int


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """`step` is None when there is nothing to compute now. `chunks`: of which sequences it computes known tokens, and
    how many; a single one from which it draws is told as a decode."""

    step: StepPlan | None
    pulls: tuple[PullAllocated, ...] = ()
    offers: tuple[PrefillStarted, ...] = ()
    num_preempted: int = 0
    starts: tuple[SequenceStarted, ...] = ()
    chunks: tuple[tuple[JobKey, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that has run. `num_budget_tokens` is what the budget had for prompts, in tokens of a prompt's
    beginning. `target_s` is the strictest latency target of the sequences that decoded; 0: none. Seconds, from the
    moment in which planning began to that in which the results were handed out. What the features count as tokens of
    prompts were `num_drafted` guesses beside them."""

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
        """Even the least that the step had to compute was predicted to take longer than the target."""
        return 0 < self.target_s < self.predicted_s


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """One sequence after a commit. `tokens` begin at output index `first_index`, `scores` at the prompt's token
    `first_scored`. The sequence has ended when `finish`, `handed_over` or `error` is set. `num_cached` counts tokens
    taken from the prefix cache at its start, where its prompt was computed. `first_tokens`: what a prefill hands over,
    one for each choice of its job. A job of several choices has `branches` once they were drawn or have failed, one for
    each choice that is open; tokens and ends are theirs."""

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
        """One for each choice that it is about."""
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


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """How full one scheduler is."""

    num_running: int
    num_waiting: int
    num_reserved_blocks: int
    backlog: Backlog
