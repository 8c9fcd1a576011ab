"""Chooses what each step may compute of prompts and learns from how long steps take; never picks a sequence and never
reads a clock."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sched.budget.step_budget import LEAST_TOKENS, PrefillBudget, StepBudget
from tandem.sched.budget.step_time_model import StepCostModel, features
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.step_plan import StepPlan, StepResult

MIN_HEADROOM, MAX_HEADROOM = 0.05, 0.5
MAX_OPEN = 16
NUM_DEVIATIONS = 1.5
"""Steps are planned to end so many deviations of the noise before the target: then about one in fifteen is late."""


@dataclass(frozen=True, slots=True)
class _Planned:
    features: StepFeatures
    predicted_s: float
    target_s: float
    num_budget_tokens: int
    num_preempted: int
    has_other_work: bool
    num_drafted: int


class StepSizer:
    """Open plans and the model. `num_steps_over_target` counts plans that could not be made to fit their target,
    `num_prefill_tokens` and `num_decode_tokens` what all plans were made of."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.model = StepCostModel()
        self.budget = StepBudget(max_num_batched_tokens)
        self.num_steps_over_target = 0
        self.num_prefill_tokens = self.num_decode_tokens = 0
        self._open: dict[int, _Planned] = {}
        self._target_s = 0.0
        self._num_budget_tokens = 0

    def budget_for(self, decodes: StepFeatures, num_tokens: int, target_s: float) -> PrefillBudget:
        """What the step that is being planned may compute of prompts beside its `decodes`: at most `num_tokens`.
        Without a target that is all there is."""
        self._target_s, self._num_budget_tokens = target_s, num_tokens
        if target_s <= 0:
            return PrefillBudget(num_tokens)
        cost = self.model.cost
        headroom = max(MIN_HEADROOM, min(MAX_HEADROOM, NUM_DEVIATIONS * self.model.noise))
        room_s = target_s / (1 + headroom) - cost.predict(decodes)
        num_affordable = cost.chunk_tokens(0, room_s)
        rung = self.budget.choose(num_affordable)
        allowance = PrefillBudget(num_tokens, cost.chunk_s(0, rung), cost)
        if num_affordable < LEAST_TOKENS:
            allowance = allowance.floor()
            rung = allowance.num_tokens
        self._num_budget_tokens = min(num_tokens, rung)
        return allowance

    def planned(self, plan: StepPlan, num_preempted: int) -> None:
        """A plan was made under the last allowance."""
        step = features(plan.slices)
        predicted_s, has_other_work = self.model.predict(step), bool(plan.num_host_copies or plan.digests)
        target_s = self._target_s if plan.slices else 0.0
        num_drafted = plan.num_drafted if step.num_prefill_tokens else 0
        opened = _Planned(
            step, predicted_s, target_s, self._num_budget_tokens, num_preempted, has_other_work, num_drafted
        )  # fmt: skip
        self._open[plan.number] = opened
        # A driver that does not time its steps leaves them open.
        self._open.pop(plan.number - MAX_OPEN, None)
        self.num_steps_over_target += 0 < opened.target_s < opened.predicted_s
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_decode_tokens += step.num_decode_seqs

    def calibrated(self, cost: StepCost) -> None:
        """What steps cost here, as measured before there was work."""
        self.model.restart(cost)

    def measured(self, result: StepResult, seconds: float) -> StepRecord:
        """A plan has finished and took so long, from when planning began until its results were handed out. One that
        failed teaches nothing about time, nor does one that copied between the two memories or digested what others
        borrow, which the model does not know of."""
        opened = self._open.pop(result.number)
        has_failed = any(piece.error is not None for piece in result.slices)
        if not has_failed and not opened.has_other_work and seconds > 0:
            self.model.observe(opened.features, seconds)
        return StepRecord(
            number=result.number,
            features=opened.features,
            predicted_s=opened.predicted_s,
            measured_s=seconds,
            target_s=opened.target_s,
            num_budget_tokens=opened.num_budget_tokens,
            num_preempted=opened.num_preempted,
            has_failed=has_failed,
            num_drafted=opened.num_drafted,
        )
