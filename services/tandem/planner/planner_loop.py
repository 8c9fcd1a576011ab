"""Observe a cluster and decide and apply its size, at a fixed interval."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import PlannerConfig
from tandem.obs.logs.log_formatters import fields
from tandem.obs.tracing import end_span
from tandem.planner.actuator import Actuator, ActuatorFailed
from tandem.planner.demand_delta import DemandDelta, DemandDeltaResult
from tandem.planner.plan_report import PlanReport
from tandem.planner.planner_metrics import PlannerMetrics
from tandem.planner.pool_targets import compute_targets, most_of
from tandem.planner.worker_inventory import WorkerInventory
from tandem.scaling.scaler import Scaler, pause_s
from tandem.scaling.worker_state import WorkerState, build_observation
from tandem.stores.demand_store import DemandStore
from tandem.stores.redis_client import StoreUnavailable

_log = logging.getLogger(__name__)


def problem_of(workers: Sequence[WorkerState], *, may_sleep: bool) -> str:
    """Return why too little is known about `workers` to decide anything; an empty text if enough is known.

    Too little is known if more than half of the workers do not answer, or if there are none. `may_sleep`: whether the
    settings allow all pools to be empty; if so, it is no problem that there are none."""
    if not workers and not may_sleep:
        return "no worker is registered"
    silent = [worker for worker in workers if worker.load is None]
    if 2 * len(silent) <= len(workers):
        return ""
    return f"{len(silent)} of {len(workers)} workers do not answer: {silent[0].ref}: {silent[0].problem}"


class ObservationError(Exception):
    """Raised when too little of the cluster can be observed to decide anything; its text is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Planner:
    """Observes the cluster, decides the number of workers of one model, and applies the decision.

    `demand_store`: demand published by gateways. `inventory`: registered workers. `scaler` decides, `actuator` applies.
    `own_model`: name of the model in the planner's settings. The planner scales this model if `config.model` is empty,
    no worker is registered, the settings allow empty pools, and it has scaled no other model before."""

    config: PlannerConfig
    demand_store: DemandStore
    inventory: WorkerInventory
    scaler: Scaler
    actuator: Actuator
    clock: Clock
    own_model: str = ""
    _deltas: dict[str, DemandDelta] = field(default_factory=dict, init=False)

    async def plan(self) -> PlanReport:
        """Make one decision, apply it unless the mode is explain, and return the report on it.

        If stores, workers or the actuator fail, the report has the outcome "held_back" or "failed" and the reason in
        its notes; nothing is raised for that."""
        began, at = self.clock.now(), wall_ns() / 1e9
        try:
            plan = await self._decide(at)
        except (ObservationError, ActuatorFailed) as reason:
            plan = PlanReport(
                at=at, model=self.config.model, outcome="held_back", leads=self.actuator.leads, notes=(str(reason),)
            )
        return replace(plan, seconds=self.clock.now() - began)

    async def _decide(self, at: float) -> PlanReport:
        """Observe the cluster, decide, and apply the decision. Raises ObservationError, and ActuatorFailed when the
        actuator cannot say what is starting."""
        try:
            records = await self.demand_store.read()
            workers = await self.inventory.look()
        except StoreUnavailable as error:
            raise ObservationError(f"workers and demand cannot be read from Redis: {error}") from error
        may_sleep = self.config.min_prefill == self.config.min_decode == 0
        asleep_model = next(reversed(self._deltas), self.own_model) if may_sleep else ""
        model = self.config.model or _only_model(workers, asleep_model)
        own_workers = [worker for worker in workers if worker.model == model]
        problem = problem_of(own_workers, may_sleep=may_sleep)
        if problem:
            raise ObservationError(problem)
        starting = await self.actuator.starting(model, workers)
        if not own_workers and not {"prefill", "decode"} <= starting.keys():
            # Perhaps Redis has restarted empty, and workers serve: their number must not become 0.
            raise ObservationError("no worker is registered, and how many are to run is not known")
        now = self.clock.now()
        delta = self._deltas.setdefault(model, DemandDelta(model)).look(records, now)
        observed = build_observation(now, delta.demand, delta.backlog, own_workers, starting)
        decision = self.scaler.decide(observed)
        targets = compute_targets(decision, own_workers, starting, most_of(self.config))
        plan = PlanReport(
            at=at,
            model=model,
            outcome="held_back" if decision.held_back else "explained",
            leads=self.actuator.leads,
            num_gateways=delta.num_gateways,
            observed=observed,
            decision=decision,
            replicas=targets.replicas,
            workers={worker.ref.id: worker.role for worker in own_workers},
            notes=_notes(delta, own_workers),
        )
        if self.config.mode == "explain":
            return plan
        # A decision that is held back is applied too: it repeats the current size, which Serve must be sent regularly.
        try:
            done = await self.actuator.carry_out(model, targets, decision.reasons, workers)
        except ActuatorFailed as error:
            return replace(plan, outcome="failed", notes=(*plan.notes, str(error)), leads=self.actuator.leads)
        outcome = "held_back" if done.outcome == "carried_out" and decision.held_back else done.outcome
        notes = (*plan.notes, *done.notes)
        return replace(plan, outcome=outcome, replicas=done.replicas, notes=notes, leads=self.actuator.leads)


@dataclass(slots=True, eq=False)
class Loop:
    """Makes a decision every `interval_s` seconds, or more often while there is no worker.

    Each decision is reported in a trace, in metrics, in the log and to `on_plan`."""

    planner: Planner
    interval_s: float
    metrics: PlannerMetrics
    tracer: Tracer
    on_plan: Callable[[PlanReport], None]
    _last_summary: tuple[object, ...] = field(default=(), init=False)

    async def run(self, stopped: asyncio.Event) -> None:
        """Make decisions until `stopped` is set.

        An exception in a decision is logged, and the next decision follows after the interval."""
        while not stopped.is_set():
            seconds = self.interval_s
            try:
                seconds = pause_s((await self.once()).observed, self.interval_s)
            except Exception:
                _log.exception("the planner failed to decide and decides again in %g s", seconds)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), seconds)

    async def once(self) -> PlanReport:
        span = self.tracer.start_span("plan", Context())
        plan = await self.planner.plan()
        self.metrics.planned(plan)
        error = "; ".join(plan.notes) if plan.outcome == "failed" else ""
        span.set_attributes(plan.attributes())
        end_span(span, wall_ns() / 1e9, error)
        self._log(plan)
        self.on_plan(plan)
        return plan

    def _log(self, plan: PlanReport) -> None:
        """Log a plan; at level DEBUG if it equals the previous one."""
        level = logging.WARNING if plan.outcome == "failed" else logging.INFO
        if plan.summary == self._last_summary:
            level = logging.DEBUG
        self._last_summary = plan.summary
        if _log.isEnabledFor(level):
            words = "; ".join(plan.sentences)
            _log.log(level, "%s: %s", plan.headline, words, extra=fields(outcome=plan.outcome, model=plan.model))


def _only_model(workers: Sequence[WorkerState], asleep_model: str) -> str:
    """Return the model of all workers, `asleep_model` where there are none. Raises ObservationError where that is empty
    or workers serve several models."""
    models = sorted({worker.model for worker in workers} or filter(None, [asleep_model]))
    if len(models) != 1:
        problem = f"workers serve {', '.join(models)}: set planner.model to the one that is to be scaled"
        raise ObservationError(problem if models else "no worker is registered")
    return models[0]


def _notes(delta: DemandDeltaResult, own_workers: Sequence[WorkerState]) -> tuple[str, ...]:
    """Return notes on missing data that make a decision less accurate."""
    silent = [worker for worker in own_workers if worker.load is None]
    silent_notes = (f"{len(silent)} workers do not answer and count as serving: {silent[0].problem}",) if silent else ()
    return (*((delta.problem,) if delta.problem else ()), *silent_notes)
