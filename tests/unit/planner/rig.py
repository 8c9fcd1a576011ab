"""Build one planner's RayCluster actuator on a simulated world, with the planner's own Kubernetes client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from kubernetes import client

from tandem.core.ids import PlannerId, ServeId
from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuationResult, ActuatorFailed
from tandem.planner.kube_client import KubeApi
from tandem.planner.kube_error import Backoff, KubeError
from tandem.planner.leader_election import Election
from tandem.planner.lease_keeper import LeaseKeeper
from tandem.planner.pod_drain import PodDrain
from tandem.planner.pod_watch import PodInformer
from tandem.planner.pool_targets import compute_targets
from tandem.planner.ray_cluster import ClusterFinder
from tandem.planner.raycluster_actuator import RayClusterActuator, Retries
from tandem.planner.serve_actuator import ServeActuator
from tandem.scaling.decision import Decision, ReplicaTarget, RoleChange
from tandem.stores.replica_targets import TargetRecord
from tests.unit.planner.world import GROUPS, SERVICE, World

LEASE_S = 15.0
SINGLE = tuple(WorkerGroup(role, group) for role, group in GROUPS.items())


Connect = Callable[[str], KubeApi]
"""Connects the planner of a name to an API server."""


def connects(settings: client.Configuration, namespace: str) -> Connect:
    return lambda who: KubeApi(settings, namespace, who, 5.0)


class PublishedTargets:
    """Targets that a test reads; every planner's target is accepted."""

    def __init__(self, world: World[Any]) -> None:
        self._world = world

    async def publish(self, record: TargetRecord) -> PlannerId:
        self._world.published.append(dict(record.replicas))
        return record.planner

    async def read(self, model: str) -> None:
        return None

    async def deployed(self, model: str) -> dict[str, dict[ServeId, int]]:
        return {}

    async def resign(self, model: str, planner: PlannerId) -> None:
        pass

    async def close(self) -> None:
        pass


class Planner:
    """Planner under test. `waits`: seconds that it would have waited; `errors`: calls that failed."""

    def __init__(self, world: World[Any], connect: Connect, name: str, groups: tuple[WorkerGroup, ...]) -> None:
        self.world = world
        self.errors: list[KubeError] = []
        self.waits: list[float] = []
        self.api = connect(name)
        clock = world.clock
        self.election = Election(name, LEASE_S)
        self.watches: list[PodInformer] = []
        self.finder = ClusterFinder(self.api, SERVICE, "", groups, self._watch)
        owner, failed = self.finder.owner, self.errors.append
        self.leadership = LeaseKeeper(self.election, self.api, "tandem-planner", clock, owner, failed)
        targets: Any = PublishedTargets(world)
        self.actuator = RayClusterActuator(
            self.finder,
            self.leadership,
            PodDrain(world.census, clock, [group.name for group in groups if group.num_pods > 1]),
            ServeActuator(PlannerId(name), targets, world.census, {}),
            Retries(Backoff(lambda: 0.0), self.errors.append, self._wait),
        )
        self.on_wait: Callable[[], None] = lambda: None

    async def round(self, target: ReplicaTarget, changes: Sequence[RoleChange] = ()) -> ActuationResult | str:
        """Make one decision for the given numbers of workers, as the program does; return failures as text."""
        self.leadership.look()
        workers = self.world.states()
        try:
            starting = await self.actuator.starting("m", workers)
            decision = Decision(
                target=target, changes=tuple(changes), needed=target, forecast=None, reasons=("because",)
            )
            own_workers = [worker for worker in workers if worker.model == "m"]
            targets = compute_targets(decision, own_workers, starting, {})
            return await self.actuator.carry_out("m", targets, decision.reasons, workers)
        except ActuatorFailed as error:
            return str(error)

    async def until_pods_are_known(self) -> None:
        """Wait until the pod watch, if there is one, has caught up with the world."""
        if self.watches:
            expected = {(name, name in self.world.ending) for name in self.world.pods()}
            await eventually(lambda: {(pod.name, pod.is_ending) for pod in self.watches[-1].pods() or ()} == expected)

    async def close(self) -> None:
        await self.actuator.close()
        self.api.close()

    def _watch(self, selector: str) -> PodInformer:
        watch = PodInformer(self.api, selector, self.world.clock, Backoff(lambda: 0.0, first_s=0.01, most_s=0.05))
        self.watches.append(watch)
        return watch

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.on_wait()


MakePlanner = Callable[..., Planner]
"""Makes the planner of a name, and of other worker groups than SINGLE where they are given."""


async def rounds(planner: Planner, world: World[Any], target: ReplicaTarget, number: int) -> ActuationResult:
    """Make `number` decisions, and let the world take a step after each; return the result of the last."""
    done: ActuationResult | str = ""
    for _ in range(number):
        done = await planner.round(target)
        world.step()
        await planner.until_pods_are_known()
    assert isinstance(done, ActuationResult), done
    return done


async def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until, "never came"
        await asyncio.sleep(0.005)
