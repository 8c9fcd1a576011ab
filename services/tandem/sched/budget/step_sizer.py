"""Choose the prefill budget of each step (how many prompt tokens it may compute), and learn from measured step times.

The caller passes the time; `prefill_sharing` decides which prompts use the budget.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sched.budget.step_time_model import StepCostModel, features
from tandem.sched.state.schedule_result import StepRecord
from tandem.sched.state.step_plan import StepPlan, StepResult

LEAST_TOKENS = 8
"""Fewest prompt tokens of a step, if it has any. A latency target that leaves time for fewer is exceeded instead."""
FLOOR_TOKENS = 32
"""Prompt tokens of a step that cannot meet its target even with the fewest. With both constants, a prompt of n tokens
that is alone takes at most n / 8 steps within the target, and n / 32 steps beyond."""
PATIENCE = 8
"""Consecutive steps in which a larger size must fit before `StepBudget` rises."""
MARGIN = 1.1
"""Factor by which the affordable tokens must exceed a size before `StepBudget` rises to it."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Hold what one step may still spend on prompts: `num_tokens` tokens and, under a latency target, `seconds`.

    `cost` converts tokens to seconds; None: there is no target. Under a target the time is limited, so a chunk has
    fewer tokens, the further into its prompt it begins. Values are immutable: methods return new budgets.
    """

    num_tokens: int
    seconds: float = math.inf
    cost: StepCost | None = None

    def fit(self, start: int, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens of a prompt, from position `start` on, the budget covers."""
        num_tokens = min(num_tokens, self.num_tokens)
        if self.cost is None or num_tokens <= 0:
            return max(0, num_tokens)
        return int(min(num_tokens, self.cost.chunk_tokens(start, self.seconds) + 1e-6))

    def less(self, start: int, num_tokens: int) -> PrefillBudget:
        """Return the budget that remains after a chunk of `num_tokens` tokens from position `start` on; its `seconds`
        may be negative."""
        spent = 0.0 if self.cost is None else self.cost.chunk_s(start, num_tokens)
        return replace(self, num_tokens=max(0, self.num_tokens - num_tokens), seconds=self.seconds - spent)

    def part(self, number: int) -> PrefillBudget:
        """Return the budget divided by `number`, in tokens (rounded up) and in seconds."""
        return replace(self, num_tokens=-(-self.num_tokens // number), seconds=self.seconds / number)

    def floor(self) -> PrefillBudget:
        """Return the budget of a step that cannot compute LEAST_TOKENS within its target: up to FLOOR_TOKENS tokens
        without a time limit."""
        return PrefillBudget(min(self.num_tokens, FLOOR_TOKENS))


class StepBudget:
    """Choose the number of prompt tokens of each step under a latency target, with few changes despite noisy
    measurements.

    The number is one of a fixed list of sizes, `rungs`: LEAST_TOKENS times 1, 1.5, 2, 3, 4, 6, 8, ..., and
    `max_tokens`. It falls as soon as the target leaves time for fewer tokens, because clients notice a step over its
    target. It rises only after a larger size has fitted with a margin for PATIENCE steps.
    """

    def __init__(self, max_tokens: int) -> None:
        self.rungs = ladder(max_tokens)
        self._rung = 0
        self._num_higher = 0
        self._lowest = math.inf

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt tokens that `choose` chose last; the smallest of `rungs` at the start."""
        return self.rungs[self._rung]

    def choose(self, num_affordable: float) -> int:
        """Choose the number of prompt tokens of the next step, one of `rungs`, and return it.

        `num_affordable`: how many prompt tokens the step could compute within its latency target. The result exceeds it
        only where even the smallest of `rungs` does.
        """
        fits = self._highest(num_affordable)
        if fits < self._rung:
            self._move(fits)
        elif self._highest(num_affordable / MARGIN) <= self._rung:
            self._num_higher = 0
            self._lowest = math.inf
        else:
            self._num_higher += 1
            self._lowest = min(self._lowest, num_affordable)
            if self._num_higher >= PATIENCE:
                self._move(self._highest(self._lowest / MARGIN))
        return self.num_tokens

    def _highest(self, num_tokens: float) -> int:
        return max(0, bisect_right(self.rungs, num_tokens) - 1)

    def _move(self, rung: int) -> None:
        self._rung = rung
        self._num_higher = 0
        self._lowest = math.inf


def ladder(max_tokens: int) -> tuple[int, ...]:
    """Return the step sizes among which a `StepBudget` chooses, in tokens, ascending.

    They are LEAST_TOKENS times 1, 1.5, 2, 3, 4, 6, 8, ... below `max_tokens`, and `max_tokens` itself, which may be
    less than LEAST_TOKENS.
    """
    powers = (LEAST_TOKENS << shift for shift in range((max_tokens // LEAST_TOKENS).bit_length()))
    steps = [rung for power in powers for rung in (power, power * 3 // 2) if rung < max_tokens]
    return (*steps, max_tokens)


MIN_HEADROOM, MAX_HEADROOM = 0.05, 0.5
"""Bounds of the safety margin below the latency target, as a fraction of the predicted time."""
MAX_OPEN = 16
"""Plans whose measurement is awaited; older ones are dropped."""
NUM_DEVIATIONS = 1.5
"""Standard deviations of the prediction error by which a step is planned to end before its target: about one step in
fifteen is then late."""


class StepSizer:
    """Choose the prompt tokens of each step so that it meets its latency target, and learn step times from
    measurements.

    For each step call `budget_for`, then `planned`, and `measured` when the time of the step is known. `model` predicts
    step times. `num_steps_over_target` counts plans whose predicted time exceeds their latency target;
    `num_prefill_tokens` and `num_decode_tokens` count the tokens of all plans.
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
        self._num_preempted = 0
        self._num_yielded = 0

    def budget_for(self, decodes: StepFeatures, num_tokens: int, target_s: float) -> PrefillBudget:
        """Return the tokens and seconds that the next step may spend on prompts, in addition to its decodes.

        `decodes`: the work of these decodes, ignored without a target. `num_tokens`: upper limit of the tokens.
        `target_s`: latency target of the step in seconds; 0: no target. The seconds are what the decodes leave of the
        target. If fewer than LEAST_TOKENS tokens fit into them, the result is `PrefillBudget.floor`.
        """
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

    def preempted(self, num_preempted: int, num_yielded: int) -> None:
        """Add the numbers of sequences that were preempted to the record of the next plan. `num_preempted` and
        `num_yielded` are those of `ScheduleResult`."""
        self._num_preempted += num_preempted
        self._num_yielded += num_yielded

    def planned(self, plan: StepPlan) -> None:
        """Record a plan, with its predicted time, until `measured` is called with its result. The plan must have been
        made with the latest result of `budget_for`."""
        step = features(plan.slices)
        record = StepRecord(
            number=plan.number,
            features=step,
            predicted_s=self.model.predict(step),
            measured_s=0.0,
            target_s=self._target_s if plan.slices else 0.0,
            num_budget_tokens=self._num_budget_tokens,
            num_preempted=self._num_preempted,
            has_failed=False,
            num_drafted=plan.num_drafted if step.num_prefill_tokens else 0,
            num_yielded=self._num_yielded,
        )
        self._num_preempted = self._num_yielded = 0
        self._open[plan.number] = record, not (plan.num_host_copies or plan.digests)
        # A driver that does not time its steps leaves them open.
        self._open.pop(plan.number - MAX_OPEN, None)
        self.num_steps_over_target += record.is_planned_over_target
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_decode_tokens += step.num_decode_seqs

    def measured(self, result: StepResult, seconds: float) -> StepRecord:
        """Return the record of the plan with this `result`, and learn from its measured time. `seconds`: time from the
        start of planning to the delivery of the result.

        The model does not learn from a plan that failed, nor from one that also copied blocks to or from host memory or
        digested blocks of prefix fetches, because it does not model that work. Raises KeyError for a plan that was
        measured before or is older than the last MAX_OPEN plans.
        """
        record, is_learnable = self._open.pop(result.number)
        has_failed = any(piece.error is not None for piece in result.slices)
        if is_learnable and not has_failed and seconds > 0:
            self.model.observe(record.features, seconds)
        return replace(record, measured_s=seconds, has_failed=has_failed)
