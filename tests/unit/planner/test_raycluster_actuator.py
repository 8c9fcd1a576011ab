"""Test the RayCluster actuator on the double of the API server: faults, and what it asks of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuationResult
from tandem.scaling.decision import ReplicaTarget
from tests.unit.planner.kube_server import Fault, KubeServer, Object, Refused
from tests.unit.planner.rig import LEASE_S, MakePlanner, Planner, eventually, rounds
from tests.unit.planner.world import CLUSTER, GROUPS, World

pytestmark = pytest.mark.parametrize("api_server", ["double"], indirect=True)
"""Only the double has faults."""
PAIRS = WorkerGroup("decode", GROUPS["decode"], num_workers=2, num_spare=1)


async def test_more_pods_are_requested_at_once(planner: Planner, world: World[KubeServer]) -> None:
    world.create(1, 2)
    done = await rounds(planner, world, ReplicaTarget(3, 4), 1)
    assert done.outcome == "carried_out" and done.replicas == {"prefill": 3, "decode": 4}
    assert world.replicas() == (3, 4)
    assert "group prefill-group grows from 1 to 3 pods" in done.notes
    (write,) = world.api.writes()
    assert write.who == "p1" and write.body[-1]["path"] == "/metadata/resourceVersion"
    assert world.published == [{"prefill": 3, "decode": 4}]
    await rounds(planner, world, ReplicaTarget(3, 4), 4)
    assert len(world.api.writes()) == 1, "what is as it should be is not written again"


async def test_a_worker_long_unregistered_is_drained_before_its_pod_is_deleted(
    planner: Planner, world: World[KubeServer]
) -> None:
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    world.hidden |= {*world.pods(GROUPS["decode"])}
    world.clock.at += 130.0
    await planner.until_pods_are_known()
    await rounds(planner, world, ReplicaTarget(1, 1), 1)
    assert world.replicas() == (1, 2), "it answers that it has work"
    assert [world.workers[name].is_draining for name in world.pods(GROUPS["decode"])].count(True) == 1
    await rounds(planner, world, ReplicaTarget(1, 1), 4)
    assert world.replicas() == (1, 1)


async def test_serve_gets_no_fewer_replicas_than_the_pods_have_room_for(
    planner: Planner, world: World[KubeServer]
) -> None:
    """Let a worker be unregistered for a while: with fewer replicas Serve would end a worker that was not drained."""
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 2), 2)
    hidden = next(name for name in world.pods(GROUPS["decode"]) if not world.workers[name].is_draining)
    lost = world.workers.pop(hidden)
    assert isinstance(done := await planner.round(ReplicaTarget(1, 2)), ActuationResult), done
    world.workers[hidden] = lost
    assert world.replicas() == (1, 4) and world.published[-1]["decode"] == 4


async def test_serve_gets_replicas_for_whole_pods(make_planner: MakePlanner, world: World[KubeServer]) -> None:
    pairs = make_planner("p1", (WorkerGroup("prefill", GROUPS["prefill"]), PAIRS))
    world.create(1, 4)
    await pairs.round(ReplicaTarget(1, 5))
    assert world.published == [{"prefill": 1, "decode": 6}], "a pod to spare, three of two workers each"


async def test_a_conflict_is_read_again_and_decided_again(planner: Planner, world: World[KubeServer]) -> None:
    world.create(1, 2)
    patches = 0

    def someone_else(method: str, plural: str, who: str) -> None:
        """Writes between our reading and our writing, twice."""
        nonlocal patches
        if method == "PATCH" and (patches := patches + 1) <= 2:
            other = world.api.get("rayclusters", CLUSTER)
            other["spec"]["workerGroupSpecs"][1]["replicas"] += 1
            world.api.put("rayclusters", CLUSTER, other)

    world.api.fault = someone_else
    await rounds(planner, world, ReplicaTarget(2, 6), 1)
    assert [error.status for error in planner.errors] == [409, 409]
    assert world.replicas() == (2, 6)
    assert planner.waits == [0.2, 0.4]


@pytest.mark.parametrize(
    ("fault", "waited"),
    [
        (Fault(429, {"Retry-After": "7"}), 7.0),
        (Fault(429), 0.2),
        (Fault(500), 0.2),
        (Fault(503, {"Retry-After": "2"}), 2.0),
        (Fault(503, is_late=True), 0.2),
        (Fault(0), 0.2),
        (Fault(0, is_late=True), 0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_what_fails_for_a_while_is_tried_again(
    planner: Planner, world: World[KubeServer], fault: Fault, waited: float, method: str
) -> None:
    world.create(1, 2)
    faults = [fault]
    world.api.fault = lambda m, plural, who: faults.pop() if faults and (m, plural) == (method, "rayclusters") else None
    await rounds(planner, world, ReplicaTarget(2, 2), 1)
    assert world.replicas() == (2, 2) and len(world.api.writes()) == 1, "and what was done is not done again"
    assert planner.waits == [waited] and [error.status for error in planner.errors] == [fault.status]


async def test_what_fails_for_good_is_not(planner: Planner, world: World[KubeServer]) -> None:
    world.create(1, 2)
    world.api.fault = lambda method, plural, who: Fault(403) if method == "PATCH" else None
    assert "403" in str(await planner.round(ReplicaTarget(2, 2)))
    assert planner.waits == [] and world.replicas() == (1, 2)
    world.api.fault = lambda method, plural, who: Fault(500) if plural == "rayclusters" else None
    assert "500" in str(await planner.round(ReplicaTarget(2, 2)))
    assert len(planner.waits) == 4, "nor for ever"


async def test_a_patch_that_the_schema_refuses_is_not_tried_again(planner: Planner, world: World[KubeServer]) -> None:
    world.create(1, 2)

    def refuse(who: str, before: Object | None, after: Object) -> None:
        if "workerGroupSpecs" in after.get("spec", {}):
            raise Refused(422, "Invalid", "spec.workerGroupSpecs[0].replicas: too many", "spec.workerGroupSpecs")

    world.api.wrote = refuse
    assert "too many" in str(await planner.round(ReplicaTarget(2, 2)))
    assert planner.waits == [] and [error.label for error in planner.errors] == ["invalid"]
    assert not planner.errors[0].is_conflict


async def test_a_watch_that_expired_is_begun_again_with_a_list(planner: Planner, world: World[KubeServer]) -> None:
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    world.api.compact()
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    lists = [call for call in world.api.calls if call.plural == "pods"]
    assert len(lists) == 2
    faults = [Fault(410), Fault(500), Fault(0)]
    world.api.fault = lambda method, plural, who: faults.pop() if faults and plural == "pods" else None
    world.api.compact()
    await rounds(planner, world, ReplicaTarget(1, 4), 1)
    await eventually(lambda: not faults)
    await rounds(planner, world, ReplicaTarget(1, 4), 1)
    assert len(world.pods(GROUPS["decode"])) == 4


async def test_pods_without_events_for_long_are_not_known(planner: Planner, world: World[KubeServer]) -> None:
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    world.api.fault = lambda method, plural, who: Fault(500) if plural == "pods" else None
    planner.watches[-1].close()
    world.clock.at += 61.0
    assert "its watch is silent" in str(await planner.round(ReplicaTarget(1, 1)))
    assert world.replicas() == (1, 2)


async def test_a_pod_that_died_unseen_is_not_counted_on(planner: Planner, world: World[KubeServer]) -> None:
    """The pod was replaced: if it were named, one more pod would have to go, and KubeRay would choose which."""
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 4), 1)
    planner.watches[-1].close()
    world.lose(next(name for name in world.pods(GROUPS["decode"]) if name not in world.workers))
    world.reconcile()
    await planner.round(ReplicaTarget(1, 3))
    world.reconcile()
    assert world.replicas() == (1, 3) and len({*world.pods(GROUPS["decode"])} - {*world.ending}) == 3


async def test_a_pod_that_the_watch_has_not_shown_yet_stays_named(planner: Planner, world: World[KubeServer]) -> None:
    """Another planner named it, for example, and this one leads since."""
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    planner.watches[-1].close()
    cluster = world.api.get("rayclusters", CLUSTER)
    decode = cluster["spec"]["workerGroupSpecs"][1]
    decode["replicas"] = 3
    world.api.put("rayclusters", CLUSTER, cluster)
    world.reconcile()
    (young,) = {*world.pods(GROUPS["decode"])} - {*world.workers}
    decode |= {"replicas": 2, "scaleStrategy": {"workersToDelete": [young]}}
    world.api.put("rayclusters", CLUSTER, cluster)
    await planner.round(ReplicaTarget(1, 3))
    decode = world.api.get("rayclusters", CLUSTER)["spec"]["workerGroupSpecs"][1]
    assert decode["replicas"] == 3 and decode["scaleStrategy"] == {"workersToDelete": [young]}


async def test_a_worker_that_somebody_else_drained_is_replaced_after_a_while(
    planner: Planner, world: World[KubeServer]
) -> None:
    world.create(1, 3)
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    drained = world.pods(GROUPS["decode"])[0]
    world.workers[drained].is_draining = True
    await rounds(planner, world, ReplicaTarget(1, 3), 8)
    assert drained in world.pods() and world.api.writes() == [], "Serve may be about to end it"
    await rounds(planner, world, ReplicaTarget(1, 3), 12)
    assert drained not in world.pods() and world.num_serving(GROUPS["decode"]) == 3


async def test_a_leader_that_is_stopped_leads_until_it_resigns(planner: Planner, world: World[KubeServer]) -> None:
    """Its loop may be in the middle of a decision."""
    world.create(1, 2)
    await planner.round(ReplicaTarget(1, 2))
    stopped = asyncio.Event()
    running = asyncio.create_task(planner.leadership.run(stopped))
    stopped.set()
    await running
    assert planner.leadership.leads and world.holder == "p1"
    planner.leadership.resign()
    assert not planner.leadership.leads and world.holder == ""
    assert not [call for call in world.api.calls if call.plural == "leases" and call.status == 409]


async def test_a_leader_that_cannot_renew_stops_before_another_may_begin(
    planner: Planner, world: World[KubeServer]
) -> None:
    world.create(1, 2)
    assert (await planner.round(ReplicaTarget(2, 2))).outcome == "carried_out"  # type: ignore[union-attr]
    world.api.fault = lambda method, plural, who: Fault(500) if plural == "leases" and who == "p1" else None
    world.clock.at += LEASE_S * 2 / 3
    assert (await planner.round(ReplicaTarget(3, 3))).outcome == "standby"  # type: ignore[union-attr]
    assert planner.errors[-1].status == 500 and world.replicas() == (2, 2)


async def test_whoever_lost_the_lease_while_it_waited_does_not_write(
    planner: Planner, world: World[KubeServer]
) -> None:
    world.create(1, 2)
    faults = [Fault(500)]
    world.api.fault = lambda method, plural, who: faults.pop() if faults and method == "PATCH" else None

    def sleep_long() -> None:
        world.clock.at += LEASE_S

    planner.on_wait = sleep_long
    assert (await planner.round(ReplicaTarget(2, 2))).outcome == "standby"  # type: ignore[union-attr]
    assert world.api.writes() == [] and world.replicas() == (1, 2)


class Weather:
    """Two planners on an API server that fails in all ways, with pods that die and watches that expire."""

    KINDS = tuple(Fault(status, is_late=late) for status in (0, 409, 429, 500, 503) for late in (False, True))

    def __init__(self, world: World[KubeServer], make_planner: MakePlanner, seed: int) -> None:
        self.random = Random(seed)
        self.share = 0.25
        self.world = world
        self.planners = [make_planner(name) for name in ("p1", "p2")]
        world.api.fault = self._fault

    async def storm(self, target: ReplicaTarget) -> None:
        for planner in self.planners:
            if self.random.random() < 0.7:
                await planner.until_pods_are_known()
            if self.random.random() < 0.8:
                await planner.round(target)
        if self.random.random() < 0.2:
            self.world.api.compact()
        if self.random.random() < 0.15:
            self.world.lose(self.random.choice(self.world.pods()))
        self.world.step(self.random.choice((1.0, 5.0, 5.0, 20.0)))

    async def calm(self, target: ReplicaTarget, number: int) -> None:
        self.share = 0.0
        for _ in range(number):
            for planner in self.planners:
                await planner.until_pods_are_known()
                await planner.round(target)
            self.world.step()

    def _fault(self, method: str, plural: str, who: str) -> Fault | None:
        return self.random.choice(self.KINDS) if self.random.random() < self.share else None


SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4)),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 200)),
]


@pytest.fixture(params=SEEDS)
async def weather(
    request: pytest.FixtureRequest, make_planner: MakePlanner, world: World[KubeServer]
) -> AsyncIterator[Weather]:
    world.create(2, 4)
    made = Weather(world, make_planner, request.param)
    yield made
    made.share = 0.0


async def test_whatever_fails_it_is_safe_and_gets_there(weather: Weather, world: World[KubeServer]) -> None:
    """Check in the world's records that no planner wrote without the lease, and that no pod with jobs was deleted."""
    for number in range(24):
        await weather.storm(ReplicaTarget(weather.random.randint(1, 5), weather.random.randint(1, 8)))
        assert world.violations == [], number
    for _ in range(40):
        await weather.calm(ReplicaTarget(2, 3), 1)
        serving = tuple(world.num_serving(GROUPS[role]) for role in ("prefill", "decode"))
        if world.replicas() == serving == (2, 3):
            break
    assert world.replicas() == serving == (2, 3)
    num_writes = len(world.api.writes())
    assert num_writes
    await weather.calm(ReplicaTarget(2, 3), 8)
    assert len(world.api.writes()) == num_writes, "and stays there"
