"""Record the planner's decisions and errors as metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.obs.metrics import instruments as have
from tandem.obs.metrics.metrics import Metrics, Values
from tandem.planner.kube_error import KubeError
from tandem.planner.plan_report import PlanReport


class PlannerMetrics:
    """Records decisions and API errors as metrics of the planner.

    Gauges are read from the last report passed to `planned`. `leads` is called at every collection and returns whether
    this planner's decisions are applied."""

    def __init__(self, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._last: PlanReport | None = None
        self._decisions = metrics.counter(have.PLANNER_DECISIONS)
        self._errors = metrics.counter(have.PLANNER_ACTUATOR_ERRORS)
        metrics.watch(have.PLANNER_LEADER, lambda: {(): float(leads())})
        metrics.watch(have.PLANNER_TARGET, lambda: self._decided("target"))
        metrics.watch(have.PLANNER_NEEDED, lambda: self._decided("needed"))
        metrics.watch(have.PLANNER_WORKERS, self._workers)
        metrics.watch(have.PLANNER_HELD_BACK, self._held_back)

    def planned(self, plan: PlanReport) -> None:
        self._last = plan
        self._decisions.add(1, plan.outcome)

    def failed(self, error: KubeError) -> None:
        self._errors.add(1, error.label)

    def _decided(self, name: str) -> Mapping[Values, float]:
        decision = None if self._last is None else self._last.decision
        return {} if decision is None else {(role,): n for role, n in getattr(decision, name)._asdict().items()}

    def _workers(self) -> Mapping[Values, float]:
        observed = None if self._last is None else self._last.observed
        if observed is None:
            return {}
        pools = {"prefill": observed.prefill, "decode": observed.decode, "mixed": observed.mixed}
        return {
            (role, state): getattr(pool, f"num_{state}")
            for role, pool in pools.items()
            for state in ("serving", "starting", "draining")
        }

    def _held_back(self) -> Mapping[Values, float]:
        last = self._last
        return {} if last is None else {(): float(last.decision is None or bool(last.decision.held_back))}
