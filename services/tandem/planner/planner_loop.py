"""Looks at a cluster and has its size decided, over and over; never decides it and never carries it out itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import PlannerConfig
from tandem.obs.logs.log_formatters import fields
from tandem.obs.tracing.tracing import SpanRecord, Tracing
from tandem.planner.actuator import Actuator, ActuatorFailed
from tandem.planner.demand_delta import DemandDelta, DemandDeltaResult
from tandem.planner.observe import build_observation, problem_of
from tandem.planner.plan_report import PlanReport
from tandem.planner.planner_metrics import PlannerMetrics
from tandem.planner.policy import most_of
from tandem.planner.pool_targets import wanted
from tandem.planner.worker_inventory import WorkerInventory
from tandem.planner.worker_state import WorkerState
from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import Decision
from tandem.scaling.scaler import Scaler
from tandem.stores.demand_store import DemandStore, DemandUnavailable
from tandem.stores.worker_registry import RegistryUnavailable

_log = logging.getLogger(__name__)


class ObservationError(Exception):
    """Too little can be seen to decide anything."""


class ClusterSnapshot(NamedTuple):
    """Of one moment. `workers` of all models; `starting` as actuators have it."""

    model: str
    workers: tuple[WorkerState, ...]
    starting: dict[str, int]
    grown: DemandDeltaResult
    observed: ClusterState


class Planner:
    """One model's. `told` is given each plan."""

    def __init__(
        self,
        config: PlannerConfig,
        board: DemandStore,
        census: WorkerInventory,
        scaler: Scaler,
        actuator: Actuator,
        clock: Clock,
    ) -> None:
        self._config = config
        self._board = board
        self._census = census
        self._scaler = scaler
        self._actuator = actuator
        self._clock = clock
        self._growth: dict[str, DemandDelta] = {}

    async def plan(self) -> PlanReport:
        """One decision, carried out unless the mode is explain. Never raises for what is away."""
        began, at = self._clock.now(), wall_ns() / 1e9
        try:
            plan = await self._decide(await self._look(), at)
        except ObservationError as reason:
            plan = PlanReport(
                at=at, model=self._config.model, outcome="held_back", leads=self._actuator.leads, notes=(str(reason),)
            )
        return replace(plan, seconds=self._clock.now() - began)

    async def _look(self) -> ClusterSnapshot:
        try:
            records = await self._board.read()
            workers = await self._census.look()
        except (DemandUnavailable, RegistryUnavailable) as error:
            raise ObservationError(f"Redis does not tell who is there: {error}") from error
        model = self._config.model or _only_model(workers)
        mine = [worker for worker in workers if worker.model == model]
        problem = problem_of(mine)
        if problem:
            raise ObservationError(problem)
        try:
            starting = dict(await self._actuator.starting(model, workers))
        except ActuatorFailed as error:
            raise ObservationError(str(error)) from error
        now = self._clock.now()
        grown = self._growth.setdefault(model, DemandDelta(model)).look(records, now)
        return ClusterSnapshot(model, workers, starting, grown, build_observation(now, grown, mine, starting))

    async def _decide(self, sight: ClusterSnapshot, at: float) -> PlanReport:
        decision = self._scaler.decide(sight.observed)
        mine = [worker for worker in sight.workers if worker.model == sight.model]
        plan = PlanReport(
            at=at,
            model=sight.model,
            outcome="held_back" if decision.is_held_back else "explained",
            leads=self._actuator.leads,
            num_gateways=sight.grown.num_gateways,
            observed=sight.observed,
            decision=decision,
            replicas=wanted(decision, mine, sight.starting, most_of(self._config)).replicas,
            workers={worker.ref.id: worker.role for worker in mine},
            notes=_notes(sight, mine),
        )
        return plan if self._config.mode == "explain" else await self._act(plan, decision, sight)

    async def _act(self, plan: PlanReport, decision: Decision, sight: ClusterSnapshot) -> PlanReport:
        """What is held back is said again as it is, so that nobody takes silence for consent to something else."""
        try:
            done = await self._actuator.carry_out(sight.model, decision, sight.workers, sight.starting)
        except ActuatorFailed as error:
            return replace(plan, outcome="failed", notes=(*plan.notes, str(error)), leads=self._actuator.leads)
        outcome = "held_back" if done.outcome == "carried_out" and decision.is_held_back else done.outcome
        notes = (*plan.notes, *done.notes)
        return replace(plan, outcome=outcome, replicas=done.replicas, notes=notes, leads=self._actuator.leads)


class Loop:
    """Has a planner decide every `interval_s` and tells of it: a trace, metrics, the log, and `told`."""

    def __init__(
        self,
        planner: Planner,
        interval_s: float,
        measures: PlannerMetrics,
        tracing: Tracing,
        told: Callable[[PlanReport], None] = lambda plan: None,
    ) -> None:
        self._planner = planner
        self._interval_s = interval_s
        self._measures = measures
        self._tracing = tracing
        self._told = told
        self._gist: tuple[object, ...] = ()

    async def run(self, stopped: asyncio.Event) -> None:
        """Until `stopped`; a decision that fails is logged, and the next one comes."""
        while not stopped.is_set():
            try:
                await self.once()
            except Exception:
                _log.exception("a decision failed; the next one comes in %g s", self._interval_s)
            try:
                await asyncio.wait_for(stopped.wait(), self._interval_s)
            except TimeoutError:
                continue

    async def once(self) -> PlanReport:
        start = wall_ns() / 1e9
        trace = self._tracing.begin("", "")
        plan = await self._planner.plan()
        self._measures.planned(plan)
        error = "; ".join(plan.notes) if plan.outcome == "failed" else ""
        attributes = plan.attributes()
        trace.end(SpanRecord(name="plan", start=start, end=wall_ns() / 1e9, attributes=attributes, error=error))
        self._log(plan)
        self._told(plan)
        return plan

    def _log(self, plan: PlanReport) -> None:
        """What is as before is only of interest to who looks for it."""
        level = (
            logging.DEBUG
            if plan.summary == self._gist
            else logging.WARNING
            if plan.outcome == "failed"
            else logging.INFO
        )
        self._gist = plan.summary
        if _log.isEnabledFor(level):
            words = "; ".join(plan.sentences)
            _log.log(level, "%s: %s", plan.headline, words, extra=fields(outcome=plan.outcome, model=plan.model))


def _only_model(workers: Sequence[WorkerState]) -> str:
    models = sorted({worker.model for worker in workers})
    if len(models) != 1:
        many = f"workers serve {', '.join(models)}: say with planner.model which are planned"
        raise ObservationError(many if models else "no worker is registered")
    return models[0]


def _notes(sight: ClusterSnapshot, mine: Sequence[WorkerState]) -> tuple[str, ...]:
    """What keeps a decision from being as good as it could be."""
    silent = [worker for worker in mine if worker.load is None]
    told = (f"{len(silent)} workers do not answer and count as serving: {silent[0].problem}",) if silent else ()
    return (*((sight.grown.problem,) if sight.grown.problem else ()), *told)
