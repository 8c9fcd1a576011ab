"""Adapt an executor that computes at once to the `Pipeline` interface."""

from __future__ import annotations

from collections import deque

from tandem.engine.ports import Executor
from tandem.sched.state.step_plan import StepPlan, StepResult


class SerialPipeline:
    """An `engine.ports.Pipeline` that runs each plan when it is collected.

    A plan that is chained to an earlier one therefore finds the earlier plan's tokens, however many plans are open.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        return self._executor.execute(self._plans.popleft())

    def __repr__(self) -> str:
        return f"SerialPipeline({self._executor!r}, {len(self._plans)} plans)"
