"""Makes a pipeline of an executor that computes at once; never computes ahead."""

from __future__ import annotations

from collections import deque

from tandem.engine.ports import Executor
from tandem.sched.state.step_plan import StepPlan, StepResult


class SerialPipeline:
    """An `engine.ports.Pipeline`: a plan waits until it is collected, and runs then. So what is chained to a plan that
    was launched before finds that one's tokens, however many plans are open."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        return self._executor.execute(self._plans.popleft())

    def __repr__(self) -> str:
        return f"InTurn({self._executor!r}, {len(self._plans)} plans)"
