"""Test the RayCluster actuator and the real Kubernetes client on a double of the API server, faults included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from random import Random

import pytest

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuationResult
from tandem.planner.kube_error import KubeError
from tandem.scaling.decision import ReplicaTarget, RoleChange
from tests.unit.planner.kube_server import Fault, KubeServer, Object, Refused, kube_server
from tests.unit.planner.rig import LEASE_S, Planner, eventually
from tests.unit.planner.world import CLUSTER, GROUPS, SERVICE, World

PAIRS = WorkerGroup("decode", GROUPS["decode"], num_workers=2, num_spare=1)


@pytest.fixture
def served() -> Iterator[tuple[KubeServer, str]]:
    with kube_server() as found:
        yield found


@pytest.fixture
def world(served: tuple[KubeServer, str]) -> Iterator[World]:
    made = World(served[0])
    yield made
    assert made.violations == []


@pytest.fixture
async def planner(served: tuple[KubeServer, str], world: World) -> AsyncIterator[Planner]:
    made = Planner(world, served[1], "p1")
    yield made
    await made.close()


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def rounds(planner: Planner, world: World, target: ReplicaTarget, number: int) -> ActuationResult:
    done: ActuationResult | str = ""
    for _ in range(number):
        done = await planner.round(target)
        world.step()
        await planner.until_pods_are_known()
    assert isinstance(done, ActuationResult), done
    return done


async def test_more_pods_are_requested_at_once(planner: Planner, world: World) -> None:
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


async def test_fewer_go_only_when_nothing_is_left_on_them(planner: Planner, world: World) -> None:
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    assert world.replicas() == (1, 4) and [w.is_draining for w in world.workers.values()].count(True) == 1
    assert world.published[-1]["decode"] == 4, "Serve must not end one of its own choice"
    done = await rounds(planner, world, ReplicaTarget(1, 2), 1)
    assert any("waits until nothing is left" in note for note in done.notes)
    await rounds(planner, world, ReplicaTarget(1, 2), 14)
    assert world.replicas() == (1, 2) and len(world.pods(GROUPS["decode"])) == 2
    assert world.published[-1] == {"prefill": 1, "decode": 2}
    lowered = [call.body[1]["value"] for call in world.api.writes()]
    assert lowered == [3, 2], "one after the other"


async def test_a_pod_stays_named_while_it_ends(planner: Planner, world: World) -> None:
    """Otherwise KubeRay would count the pod, and delete another one in its place."""
    world.grace = 9
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 2), 12)
    assert world.replicas() == (1, 2) and len(world.ending) == 2


async def test_a_pod_that_has_no_worker_yet_goes_first(planner: Planner, world: World) -> None:
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 4), 1)
    young = [name for name in world.pods(GROUPS["decode"]) if name not in world.workers]
    assert len(young) == 2
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    assert world.replicas() == (1, 3) and not any(w.is_draining for w in world.workers.values())
    assert len({*young} & {*world.ending}) == 1


async def test_draining_pods_are_replaced_when_more_are_needed_again(planner: Planner, world: World) -> None:
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    (drained_pod,) = [name for name, worker in world.workers.items() if worker.is_draining]
    await rounds(planner, world, ReplicaTarget(1, 4), 10)
    assert world.replicas() == (1, 4) and drained_pod not in world.pods()
    assert world.num_serving(GROUPS["decode"]) == 4
    assert [call.body[1]["value"] for call in world.api.writes()] == [5, 4], "not only when the leaver is empty"
    assert max(published["decode"] for published in world.published) == 5 and world.published[-1]["decode"] == 4


async def test_a_new_leader_takes_no_pod_for_starting(
    served: tuple[KubeServer, str], world: World, closing: AsyncExitStack
) -> None:
    """A worker that only lost Redis still serves."""
    world.create(1, 2)
    hidden = world.pods(GROUPS["decode"])[1]
    world.hidden.add(hidden)
    leader = Planner(world, served[1], "p2")
    closing.push_async_callback(leader.close)
    await rounds(leader, world, ReplicaTarget(1, 1), 1)
    assert not world.workers[hidden].is_draining and hidden not in world.ending


async def test_a_worker_long_unregistered_is_drained_before_its_pod_is_deleted(planner: Planner, world: World) -> None:
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


async def test_serve_gets_no_fewer_replicas_than_the_pods_have_room_for(planner: Planner, world: World) -> None:
    """Let a worker be unregistered for a while: with fewer replicas Serve would end a worker that was not drained."""
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 2), 2)
    hidden = next(name for name in world.pods(GROUPS["decode"]) if not world.workers[name].is_draining)
    lost = world.workers.pop(hidden)
    assert isinstance(done := await planner.round(ReplicaTarget(1, 2)), ActuationResult), done
    world.workers[hidden] = lost
    assert world.replicas() == (1, 4) and world.published[-1]["decode"] == 4


async def test_serve_gets_replicas_for_whole_pods(
    served: tuple[KubeServer, str], world: World, closing: AsyncExitStack
) -> None:
    pairs = Planner(world, served[1], "p1", groups=(WorkerGroup("prefill", GROUPS["prefill"]), PAIRS))
    closing.push_async_callback(pairs.close)
    world.create(1, 4)
    await pairs.round(ReplicaTarget(1, 5))
    assert world.published == [{"prefill": 1, "decode": 6}], "a pod to spare, three of two workers each"


async def test_a_conflict_is_read_again_and_decided_again(planner: Planner, world: World) -> None:
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
    planner: Planner, world: World, fault: Fault, waited: float, method: str
) -> None:
    world.create(1, 2)
    faults = [fault]
    world.api.fault = lambda m, plural, who: faults.pop() if faults and (m, plural) == (method, "rayclusters") else None
    await rounds(planner, world, ReplicaTarget(2, 2), 1)
    assert world.replicas() == (2, 2) and len(world.api.writes()) == 1, "and what was done is not done again"
    assert planner.waits == [waited] and [error.status for error in planner.errors] == [fault.status]


async def test_what_fails_for_good_is_not(planner: Planner, world: World) -> None:
    world.create(1, 2)
    world.api.fault = lambda method, plural, who: Fault(403) if method == "PATCH" else None
    assert "403" in str(await planner.round(ReplicaTarget(2, 2)))
    assert planner.waits == [] and world.replicas() == (1, 2)
    world.api.fault = lambda method, plural, who: Fault(500) if plural == "rayclusters" else None
    assert "500" in str(await planner.round(ReplicaTarget(2, 2)))
    assert len(planner.waits) == 4, "nor for ever"


async def test_a_patch_that_the_schema_refuses_is_not_tried_again(planner: Planner, world: World) -> None:
    world.create(1, 2)

    def refuse(who: str, before: Object | None, after: Object) -> None:
        if "workerGroupSpecs" in after.get("spec", {}):
            raise Refused(422, "Invalid", "spec.workerGroupSpecs[0].replicas: too many", "spec.workerGroupSpecs")

    world.api.wrote = refuse
    assert "too many" in str(await planner.round(ReplicaTarget(2, 2)))
    assert planner.waits == [] and [error.label for error in planner.errors] == ["invalid"]
    assert not planner.errors[0].is_conflict


async def test_a_failed_test_of_a_patch_is_a_conflict(planner: Planner, world: World) -> None:
    world.create(1, 2)
    with pytest.raises(KubeError) as failed:
        planner.api.patch_cluster(CLUSTER, [{"op": "test", "path": "/spec/rayVersion", "value": "another"}])
    assert failed.value.status == 422 and failed.value.is_conflict and not failed.value.is_invalid


async def test_a_lease_with_an_invalid_name_is_reported_once_as_an_error(
    planner: Planner, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.create(1, 2)
    planner.leadership.name = "Not_A_Name"
    for _ in range(3):
        planner.leadership.look()
    assert not planner.leadership.leads and [error.label for error in planner.errors] == ["invalid"] * 3
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Not_A_Name" in record.message and "neither take nor renew" in record.message


async def test_a_watch_that_expired_is_begun_again_with_a_list(planner: Planner, world: World) -> None:
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


async def test_pods_without_events_for_long_are_not_known(planner: Planner, world: World) -> None:
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    world.api.fault = lambda method, plural, who: Fault(500) if plural == "pods" else None
    planner.watches[-1].close()
    world.clock.at += 61.0
    assert "its watch is silent" in str(await planner.round(ReplicaTarget(1, 1)))
    assert world.replicas() == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enableInTreeAutoscaling": True}, "has Ray's autoscaler on"),
        ({"suspend": True}, "is suspended"),
    ],
)
async def test_a_cluster_that_is_somebody_else_s_is_left_alone(
    planner: Planner, world: World, change: dict[str, bool], message: str
) -> None:
    world.create(1, 2, **change)
    assert message in str(await planner.round(ReplicaTarget(4, 4)))
    assert world.api.writes() == []


async def test_a_group_that_is_not_there_is_named(planner: Planner, world: World) -> None:
    world.create(1, 2)
    found = world.api.get("rayclusters", CLUSTER)
    found["spec"]["workerGroupSpecs"][1]["groupName"] = "other"
    world.api.put("rayclusters", CLUSTER, found)
    assert "no worker group decode-group" in str(await planner.round(ReplicaTarget(4, 4)))
    found["spec"]["workerGroupSpecs"][1] |= {"groupName": GROUPS["decode"], "numOfHosts": 2}
    world.api.put("rayclusters", CLUSTER, found)
    assert "2 hosts" in str(await planner.round(ReplicaTarget(4, 4)))


async def test_while_a_service_goes_over_to_another_cluster_nothing_is_changed(planner: Planner, world: World) -> None:
    world.create(1, 2)
    status = {"activeServiceStatus": {"rayClusterName": CLUSTER}, "pendingServiceStatus": {"rayClusterName": "new"}}
    world.api.put("rayservices", SERVICE, {"kind": "RayService", "status": status})
    assert "goes over from RayCluster llm-raycluster-x1 to new" in str(await planner.round(ReplicaTarget(4, 4)))
    world.api.put("rayservices", SERVICE, {"kind": "RayService"})
    assert "no cluster that serves yet" in str(await planner.round(ReplicaTarget(4, 4)))
    assert world.api.writes() == []


async def test_a_group_keeps_within_its_own_bounds(planner: Planner, world: World) -> None:
    world.create(1, 2)
    done = await rounds(planner, world, ReplicaTarget(1, 30), 1)
    assert world.replicas() == (1, 20)
    assert "group decode-group may have 1 to 20 pods, not 30" in done.notes


async def test_pods_with_one_address_are_rejected(planner: Planner, world: World) -> None:
    world.create(1, 2)
    one, other = world.pods(GROUPS["decode"])
    pod = world.api.get("pods", one)
    pod["status"]["podIP"] = world.api.get("pods", other)["status"]["podIP"]
    world.api.put("pods", one, pod)
    assert "which worker is in which is not known" in str(await planner.round(ReplicaTarget(1, 1)))
    assert not any(worker.is_draining for worker in world.workers.values())


async def test_kuberay_is_waited_for_before_a_group_shrinks(planner: Planner, world: World) -> None:
    """Otherwise KubeRay would delete pods of its own choice."""
    world.create(1, 3)
    await planner.round(ReplicaTarget(1, 5))
    done = await planner.round(ReplicaTarget(1, 2))
    assert isinstance(done, ActuationResult) and any("does not shrink before KubeRay" in note for note in done.notes)
    assert world.replicas() == (1, 5)


async def test_a_pod_that_died_unseen_is_not_counted_on(planner: Planner, world: World) -> None:
    """The pod was replaced: if it were named, one more pod would have to go, and KubeRay would choose which."""
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 4), 1)
    planner.watches[-1].close()
    world.lose(next(name for name in world.pods(GROUPS["decode"]) if name not in world.workers))
    world.reconcile()
    await planner.round(ReplicaTarget(1, 3))
    world.reconcile()
    assert world.replicas() == (1, 3) and len({*world.pods(GROUPS["decode"])} - {*world.ending}) == 3


async def test_a_worker_that_somebody_else_drained_is_replaced_after_a_while(planner: Planner, world: World) -> None:
    world.create(1, 3)
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    drained = world.pods(GROUPS["decode"])[0]
    world.workers[drained].is_draining = True
    await rounds(planner, world, ReplicaTarget(1, 3), 8)
    assert drained in world.pods() and world.api.writes() == [], "Serve may be about to end it"
    await rounds(planner, world, ReplicaTarget(1, 3), 12)
    assert drained not in world.pods() and world.num_serving(GROUPS["decode"]) == 3


async def test_roles_change_and_the_rest_is_started(planner: Planner, world: World) -> None:
    world.create(3, 2)
    await planner.round(ReplicaTarget(2, 4), [RoleChange("prefill", "decode", 1)])
    assert [role for _, role in world.roles] == ["decode"]
    assert world.replicas() == (3, 3), "one more of a role where one was taken over"


async def test_of_two_planners_one_acts_and_the_other_takes_over(
    served: tuple[KubeServer, str], world: World, planner: Planner, closing: AsyncExitStack
) -> None:
    world.create(1, 2)
    other = Planner(world, served[1], "p2")
    closing.push_async_callback(other.close)
    for target in (ReplicaTarget(2, 2), ReplicaTarget(2, 3)):
        assert isinstance(done := await planner.round(target), ActuationResult) and done.outcome == "carried_out"
        standby = await other.round(ReplicaTarget(9, 9))
        assert isinstance(standby, ActuationResult) and standby.outcome == "standby" and "p1 leads" in standby.notes[0]
        world.step()
        await planner.until_pods_are_known()
    # The leader is killed: it renews no more, and says nothing.
    world.clock.at += LEASE_S - 6
    assert (await other.round(ReplicaTarget(3, 3))).outcome == "standby"  # type: ignore[union-attr]
    world.clock.at += 6.1
    assert not planner.leadership.leads
    assert (await other.round(ReplicaTarget(3, 3))).outcome == "carried_out"  # type: ignore[union-attr]
    assert world.replicas() == (3, 3)
    assert (await planner.round(ReplicaTarget(9, 9))).outcome == "standby"  # type: ignore[union-attr]
    assert [call.who for call in world.api.writes()] == ["p1", "p1", "p2"]
    # One that stops in order leaves it at once.
    other.leadership.resign()
    assert (await planner.round(ReplicaTarget(4, 3))).outcome == "carried_out"  # type: ignore[union-attr]


async def test_a_leader_that_is_stopped_leads_until_it_resigns(planner: Planner, world: World) -> None:
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
    served: tuple[KubeServer, str], world: World, planner: Planner
) -> None:
    world.create(1, 2)
    assert (await planner.round(ReplicaTarget(2, 2))).outcome == "carried_out"  # type: ignore[union-attr]
    world.api.fault = lambda method, plural, who: Fault(500) if plural == "leases" and who == "p1" else None
    world.clock.at += LEASE_S * 2 / 3
    assert (await planner.round(ReplicaTarget(3, 3))).outcome == "standby"  # type: ignore[union-attr]
    assert planner.errors[-1].status == 500 and world.replicas() == (2, 2)


async def test_whoever_lost_the_lease_while_it_waited_does_not_write(planner: Planner, world: World) -> None:
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

    def __init__(self, world: World, url: str, seed: int) -> None:
        self.random = Random(seed)
        self.share = 0.25
        self.world = world
        self.planners = [Planner(world, url, name) for name in ("p1", "p2")]
        world.api.fault = self._fault

    async def close(self) -> None:
        self.share = 0.0
        for planner in self.planners:
            await planner.close()

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
    request: pytest.FixtureRequest, served: tuple[KubeServer, str], world: World
) -> AsyncIterator[Weather]:
    world.create(2, 4)
    made = Weather(world, served[1], request.param)
    yield made
    await made.close()


async def test_whatever_fails_it_is_safe_and_gets_there(weather: Weather, world: World) -> None:
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
