"""Test the planner's decisions while no worker is registered: pools without workers, and a Redis that lost them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.core.config import PlannerConfig
from tandem.core.ids import GatewayId
from tandem.core.slo import Slo
from tandem.core.worker_load import WorkerLoad
from tandem.planner.actuator import ActuationResult
from tandem.planner.plan_report import PlanReport
from tandem.planner.planner_loop import Planner
from tandem.planner.pool_targets import PoolTargets
from tandem.scaling.demand_totals import DemandTotals, QueueBacklog
from tandem.scaling.scaler import Scaler
from tandem.scaling.worker_state import WorkerState
from tandem.stores.demand_store import DemandRecord
from tests.unit.planner.test_seeing import worker
from tests.unit.planner.world import Tick

SLEEPS = PlannerConfig(mode="act", min_prefill=0, min_decode=0, idle_s=60.0)
ZERO = {"prefill": 0, "decode": 0}
ONE = {"prefill": 1, "decode": 1}


class Cluster:
    """A cluster whose facts a test sets: registered workers, waiting requests, and the number that Serve intends to
    run, as `DemandStore`, `WorkerInventory` and `Actuator`. `targets`: what the planner requested."""

    leads = True

    def __init__(self, config: PlannerConfig, intended: Mapping[str, int], *, own_model: str = "") -> None:
        self.workers: tuple[WorkerState, ...] = ()
        self.num_waiting = 0
        self.num_requests = 0
        self.intended = intended
        self.targets: list[Mapping[str, int]] = []
        self._clock = Tick()
        me: Any = self
        scaler = Scaler(config, Slo(ttft_s=1.0, itl_s=0.1))
        self._planner = Planner(config, me, me, scaler, me, self._clock, own_model=own_model)

    async def plan(self, seconds: float = 5.0) -> PlanReport:
        self._clock.at += seconds
        return await self._planner.plan()

    async def read(self) -> Sequence[DemandRecord]:
        totals = DemandTotals(num_requests=self.num_requests, num_input_tokens=10 * self.num_requests)
        backlog = QueueBacklog(num_requests=self.num_waiting, num_tokens=10 * self.num_waiting)
        return [DemandRecord(gateway=GatewayId("g"), totals={"m": totals}, backlog={"m": backlog}, age_s=0.5)]

    async def look(self) -> Sequence[WorkerState]:
        return self.workers

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> Mapping[str, int]:
        assert model == "m"
        num_there = {role: sum(one.pool == role for one in workers) for role in self.intended}
        return {role: max(0, number - num_there[role]) for role, number in self.intended.items()}

    async def carry_out(
        self, model: str, targets: PoolTargets, reasons: tuple[str, ...], workers: Sequence[WorkerState]
    ) -> ActuationResult:
        self.targets.append(targets.replicas)
        return ActuationResult("carried_out", targets.replicas)


async def test_pools_go_to_sleep_once_idle() -> None:
    cluster = Cluster(SLEEPS, ONE)
    idle = WorkerLoad()
    cluster.workers = tuple(
        replace(worker(name, role), load=idle) for name, role in (("p", "prefill"), ("d", "decode"))
    )
    for _ in range(12):
        await cluster.plan()
    assert cluster.targets == [ONE] * 12
    await cluster.plan()
    assert cluster.targets[-1] == ZERO
    cluster.workers, cluster.intended = (), ZERO
    assert (await cluster.plan()).outcome == "carried_out" and cluster.targets[-1] == ZERO


async def test_a_request_wakes_the_pools_of_a_planner_that_has_just_started() -> None:
    cluster = Cluster(SLEEPS, ZERO, own_model="m")
    quiet = await cluster.plan()
    assert cluster.targets == [ZERO] and quiet.outcome == "held_back"
    cluster.num_waiting = cluster.num_requests = 1
    woken = await cluster.plan(1.0)
    assert cluster.targets[-1] == ONE and woken.outcome == "carried_out" and woken.model == "m"
    assert any("requests that wait at gateways: 1" in reason for reason in woken.sentences)
    cluster.intended = ONE
    await cluster.plan()
    assert cluster.targets[-1] == ONE, "they start"


async def test_workers_that_only_the_registry_has_lost_stay() -> None:
    cluster = Cluster(SLEEPS, {}, own_model="m")
    held = await cluster.plan()
    assert held.outcome == "held_back" and not cluster.targets
    assert held.notes == ("no worker is registered, and how many are to run is not known",)
    cluster.intended = {"prefill": 3, "decode": 2}
    await cluster.plan()
    assert cluster.targets == [{"prefill": 3, "decode": 2}]


async def test_without_workers_nothing_is_decided_where_a_minimum_is_1() -> None:
    for config in (PlannerConfig(mode="act", min_prefill=0), PlannerConfig(mode="act", min_decode=0)):
        cluster = Cluster(config, ZERO, own_model="m")
        assert (await cluster.plan()).notes == ("no worker is registered",) and not cluster.targets


async def test_the_model_of_the_last_decision_is_planned_while_nobody_serves_it() -> None:
    cluster = Cluster(SLEEPS, ONE)
    assert (await cluster.plan()).notes == ("no worker is registered",)
    cluster.workers = (worker("p", "prefill"), worker("d", "decode"))
    assert (await cluster.plan()).model == "m"
    cluster.workers = ()
    assert (await cluster.plan()).model == "m"
