"""Adapt an executor that computes a plan during the call to the `Pipeline` interface."""

from __future__ import annotations

from collections import deque

from tandem.engine.ports import Executor
from tandem.sched.state.step_plan import StepPlan, StepResult


class SerialPipeline:
    """Adapt an executor that computes during the call to `engine.ports.Pipeline`.

    `launch` only queues a plan, and `collect` executes the oldest queued plan and returns its result. A plan that needs
    the tokens of an earlier plan therefore finds them, however many plans are queued.
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
