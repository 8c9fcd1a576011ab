"""Carries out in a simulated cluster what an autoscaler asks for: workers start after a while and leave by drain; never
decides how many there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tandem.routing.worker_view import Pool
from tandem.scaling.cluster_state import ClusterState, PoolState, Role, WorkerCapacity
from tandem.scaling.decision import ReplicaTarget
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.demand_counter import Meter
from tandem.sim.cluster.worker import SimWorker, WorkerSpec
from tandem.sim.cluster.worker_lifecycle import DISCOVERY_S

ROLES: tuple[Role, Role] = ("prefill", "decode")


class Autoscaler(Protocol):
    """`ongoing`: requests at the workers of each role, and for prefill those that wait at the gateways too."""

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """What a worker of each role is, and of how many accelerators. `start_s` from its order until gateways have found
    it; `drain_s` at most until one that leaves is gone."""

    kinds: Mapping[Role, WorkerSpec]
    degrees: Mapping[Role, int]
    interval_s: float
    start_s: float
    drain_s: float = 60.0


@dataclass(eq=False, slots=True)
class _BilledWorker:
    """What is paid for: from the order to the end. `worker` is None while it starts."""

    role: Role
    began_s: float
    worker: SimWorker | None = None
    serves_s: float = math.inf
    drains: bool = False
    ended_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Moment:
    """What ran at `at_s` and what was asked for then."""

    at_s: float
    serving: ReplicaTarget
    target: ReplicaTarget


@dataclass(eq=False)
class AutoscaledCluster:
    """Looks at a cluster every `interval_s` and does what the autoscaler says, at once."""

    cluster: SimCluster
    spec: ElasticSpec
    autoscaler: Autoscaler
    meter: Meter
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stays = [_BilledWorker(role, 0.0, worker, 0.0) for role in ROLES for worker in self._workers(role)]
        self.cluster.every(self.spec.interval_s, self._look)

    def gpu_hours(self, until_s: float) -> float:
        """Of all workers of the two roles, from their orders to their ends or `until_s`."""
        return sum(
            self.spec.degrees[stay.role] * max(0.0, min(stay.ended_s, until_s) - stay.began_s) for stay in self._stays
        ) / 3600  # fmt: skip

    # ---- one look

    def _look(self) -> None:
        if self.cluster.now == 0:
            return
        observed, ongoing = self._observed(), self._ongoing()
        target = self.autoscaler.target(observed, ongoing)
        serving = ReplicaTarget(observed.prefill.num_serving, observed.decode.num_serving)
        self.moments.append(Moment(self.cluster.now, serving, target))
        for role, number in zip(ROLES, target, strict=True):
            self._carry_out(role, number)

    def _observed(self) -> ClusterState:
        loads = [(worker.spec.pool, worker.engine.load()) for worker in self.cluster.workers]
        return ClusterState(
            at=self.cluster.now,
            demand=self.meter.take(self.cluster.now),
            prefill=self._state("prefill"),
            decode=self._state("decode"),
            mixed=PoolState(len(self._workers("mixed"))),
            prefill_worker=self._capability("prefill"),
            decode_worker=self._capability("decode"),
            num_queued_tokens=round(self.cluster.num_queued * self.meter.mean_input)
            + sum(load.num_queued_tokens for _, load in loads),
            num_queued_requests=self.cluster.num_queued,
            num_running_seqs=sum(load.num_running for pool, load in loads if pool != "prefill"),
        )

    def _ongoing(self) -> ReplicaTarget:
        numbers = [
            sum(load.num_running + load.num_waiting for load in (w.engine.load() for w in self._workers(role)))
            for role in ROLES
        ]
        return ReplicaTarget(numbers[0] + self.cluster.num_queued, numbers[1])

    def _state(self, role: Role) -> PoolState:
        now = self.cluster.now
        here = [stay for stay in self._stays if stay.role == role and stay.ended_s == math.inf]
        draining = sum(stay.drains for stay in here)
        serving = sum(not stay.drains and stay.serves_s <= now for stay in here)
        return PoolState(serving, len(here) - draining - serving, draining)

    def _capability(self, role: Role) -> WorkerCapacity | None:
        """By its own words, of the first that has told how fast it is; a mixed one stands for either."""
        told = (capability(worker) for worker in (*self._workers(role), *self._workers("mixed")))
        return next((one for one in told if one is not None), None)

    def _workers(self, pool: Pool) -> list[SimWorker]:
        return [worker for worker in self.cluster.workers if worker.spec.pool == pool]

    # ---- what is done

    def _carry_out(self, role: Role, number: int) -> None:
        kept = [s for s in self._stays if s.role == role and s.ended_s == math.inf and not s.drains]
        for _ in range(number - len(kept)):
            self._order(role)
        # Those that have not begun yet go first, the newest of each before the others.
        leaving = sorted(kept, key=lambda stay: (stay.worker is None, stay.began_s), reverse=True)
        for stay in leaving[: max(0, len(kept) - number)]:
            self._leave(stay)

    def _order(self, role: Role) -> None:
        now = self.cluster.now
        stay = _BilledWorker(role, now, serves_s=now + self.spec.start_s)
        self._stays.append(stay)

        def begin() -> None:
            if stay.ended_s == math.inf:
                stay.worker = self.cluster.start(self.spec.kinds[role])

        self.cluster.after(max(0.0, self.spec.start_s - DISCOVERY_S), begin)

    def _leave(self, stay: _BilledWorker) -> None:
        def ended() -> None:
            stay.ended_s = self.cluster.now

        if stay.worker is None:
            ended()
            return
        stay.drains = True
        self.cluster.drain(stay.worker, self.spec.drain_s, ended)


def capability(worker: SimWorker) -> WorkerCapacity | None:
    """None while it has told nothing."""
    spec, engine = worker.spec, worker.spec.config.engine
    if worker.step_cost is None:
        return None
    return WorkerCapacity(
        cost=worker.step_cost,
        num_blocks=spec.num_blocks,
        block_size=spec.layout.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )
