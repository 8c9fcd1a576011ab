"""Choose the prefill budget of each step, and learn from measured step times.

Time comes from the caller; which prompts use the budget is decided in `prefill_sharing`.
"""

from __future__ import annotations

from dataclasses import replace

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
        # The record of each open plan, not yet measured, and whether the model may learn from it.
        self._open: dict[int, tuple[StepRecord, bool]] = {}
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
        record = StepRecord(
            number=plan.number,
            features=step,
            predicted_s=self.model.predict(step),
            measured_s=0.0,
            target_s=self._target_s if plan.slices else 0.0,
            num_budget_tokens=self._num_budget_tokens,
            num_preempted=num_preempted,
            has_failed=False,
            num_drafted=plan.num_drafted if step.num_prefill_tokens else 0,
        )
        self._open[plan.number] = record, not (plan.num_host_copies or plan.digests)
        # A driver that does not time its steps leaves them open.
        self._open.pop(plan.number - MAX_OPEN, None)
        self.num_steps_over_target += record.is_planned_over_target
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
        record, is_learnable = self._open.pop(result.number)
        has_failed = any(piece.error is not None for piece in result.slices)
        if is_learnable and not has_failed and seconds > 0:
            self.model.observe(record.features, seconds)
        return replace(record, measured_s=seconds, has_failed=has_failed)
