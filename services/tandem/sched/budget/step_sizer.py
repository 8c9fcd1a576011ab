"""Choose the prefill budget of each step, and learn from measured step times.

Time comes from the caller; which prompts use the budget is decided in `prefill_sharing`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sched.budget.step_budget import LEAST_TOKENS, PrefillBudget, StepBudget
from tandem.sched.budget.step_time_model import StepCostModel, features
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.step_plan import StepPlan, StepResult

MIN_HEADROOM, MAX_HEADROOM = 0.05, 0.5
"""Bounds of the safety margin below the latency target, as a fraction of the predicted time."""
MAX_OPEN = 16
"""Plans whose measurement is awaited; older ones are dropped."""
NUM_DEVIATIONS = 1.5
"""Standard deviations of the prediction error by which a step is planned to end before its target: about one step in
fifteen is then late."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """Prediction and limits of a plan that is not measured yet; times in seconds."""

    features: StepFeatures
    predicted_s: float
    target_s: float
    num_budget_tokens: int
    num_preempted: int
    has_other_work: bool
    num_drafted: int


class StepSizer:
    """Own the step-time model, the current budget, and the plans that are not measured yet.

    `num_steps_over_target` counts plans that could not be made to fit their latency target; `num_prefill_tokens` and
    `num_decode_tokens` count what all plans contained.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.model = StepCostModel()
        self.budget = StepBudget(max_num_batched_tokens)
        self.num_steps_over_target = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._open: dict[int, _Planned] = {}
        self._target_s = 0.0
        self._num_budget_tokens = 0

    def budget_for(self, decodes: StepFeatures, num_tokens: int, target_s: float) -> PrefillBudget:
        """Return what the step being planned may spend on prompts beside its `decodes`: at most `num_tokens` tokens,
        and under a latency target of `target_s` seconds (0: none) at most the time that the decodes leave."""
        self._target_s = target_s
        self._num_budget_tokens = num_tokens
        if target_s <= 0:
            return PrefillBudget(num_tokens)
        cost = self.model.cost
        headroom = max(MIN_HEADROOM, min(MAX_HEADROOM, NUM_DEVIATIONS * self.model.noise))
        room_s = target_s / (1 + headroom) - cost.predict(decodes)
        num_affordable = cost.chunk_tokens(0, room_s)
        rung = self.budget.choose(num_affordable)
        prefill_budget = PrefillBudget(num_tokens, cost.chunk_s(0, rung), cost)
        if num_affordable < LEAST_TOKENS:
            prefill_budget = prefill_budget.floor()
            rung = prefill_budget.num_tokens
        self._num_budget_tokens = min(num_tokens, rung)
        return prefill_budget

    def planned(self, plan: StepPlan, num_preempted: int) -> None:
        """Record a plan that was made under the last budget, with its predicted time."""
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
        """Restart the step-time model from costs that were measured at start-up, before there were requests."""
        self.model.restart(cost)

    def measured(self, result: StepResult, seconds: float) -> StepRecord:
        """Record how long a plan took, in seconds from the start of planning to the delivery of its results; return the
        record.

        The model does not learn from a plan that failed, nor from one that also copied blocks to or from host memory or
        digested blocks of prefix fetches, because the model has no terms for that work.
        """
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
