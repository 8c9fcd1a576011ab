"""Provide the `Pipeline` interface for an executor that computes each plan within one call."""

from __future__ import annotations

from collections import deque

from tandem.engine.ports import Executor
from tandem.sched.state.step_plan import StepPlan, StepResult


class SerialPipeline:
    """Implement `engine.ports.Pipeline` by an executor that computes each plan within one call.

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
