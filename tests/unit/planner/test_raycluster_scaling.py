"""Test how planners scale a RayCluster, with their own Kubernetes client, on the double of the API server and on a real
one."""

from __future__ import annotations

import pytest

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuationResult
from tandem.scaling.decision import ReplicaTarget, RoleChange
from tests.unit.planner.rig import LEASE_S, MakePlanner, Planner, rounds
from tests.unit.planner.world import CLUSTER, GROUPS, Objects, World


async def test_fewer_go_only_when_nothing_is_left_on_them(planner: Planner, world: World[Objects]) -> None:
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    assert world.replicas() == (1, 4) and [w.is_draining for w in world.workers.values()].count(True) == 1
    assert world.published[-1]["decode"] == 4, "Serve must not end one of its own choice"
    done = await rounds(planner, world, ReplicaTarget(1, 2), 1)
    assert any("waits until nothing is left" in note for note in done.notes)
    seen = []
    for _ in range(14):
        await rounds(planner, world, ReplicaTarget(1, 2), 1)
        seen.append(world.replicas()[1])
    assert [*dict.fromkeys(seen)] == [4, 3, 2], "one after the other"
    assert world.replicas() == (1, 2) and len(world.pods(GROUPS["decode"])) == 2
    assert world.published[-1] == {"prefill": 1, "decode": 2}


async def test_all_pods_of_a_worker_go_together(make_planner: MakePlanner, world: World[Objects]) -> None:
    world.pods_of_worker = {GROUPS["decode"]: 2}
    world.create(1, 8)
    groups = (WorkerGroup("prefill", GROUPS["prefill"]), WorkerGroup("decode", GROUPS["decode"], num_pods=2))
    planner = make_planner("a", groups)
    (kept, *others) = (name for name in world.workers if name in world.pods(GROUPS["decode"]))
    world.workers[kept].num_jobs = 9
    seen = []
    for _ in range(20):
        await rounds(planner, world, ReplicaTarget(1, 2), 1)
        seen.append(world.replicas()[1])
    assert [*dict.fromkeys(seen)] == [8, 6, 4], "one worker after the other, with both of its pods"
    assert len(others) == 3 and world.published[-1] == {"prefill": 1, "decode": 2}
    await rounds(planner, world, ReplicaTarget(1, 3), 5)
    assert world.replicas() == (1, 6) and world.num_serving(GROUPS["decode"]) == 3


async def test_pods_of_a_worker_that_has_never_answered_are_not_free(
    make_planner: MakePlanner, world: World[Objects]
) -> None:
    groups = (WorkerGroup("prefill", GROUPS["prefill"]), WorkerGroup("decode", GROUPS["decode"], num_pods=2))
    world.pods_of_worker = {GROUPS["decode"]: 2}
    world.create(1, 2)
    planner = make_planner("a", groups)
    await rounds(planner, world, ReplicaTarget(1, 2), 2)
    before = {*world.workers}
    await rounds(planner, world, ReplicaTarget(1, 2), 1)
    (late,) = {*world.workers} - before
    world.silent = {late}
    await rounds(planner, world, ReplicaTarget(1, 1), 1)
    assert late in world.workers and not world.ending, "one of its pods has no known worker"
    world.silent = set()
    await rounds(planner, world, ReplicaTarget(1, 1), 12)
    assert world.replicas() == (1, 2) and len(world.workers) == 2


async def test_a_pod_stays_named_while_it_ends(planner: Planner, world: World[Objects]) -> None:
    """Otherwise KubeRay would count the pod, and delete another one in its place."""
    world.grace = 9
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 2), 12)
    assert world.replicas() == (1, 2) and len(world.ending) == 2


async def test_a_pod_that_has_no_worker_yet_goes_first(planner: Planner, world: World[Objects]) -> None:
    world.create(1, 2)
    await rounds(planner, world, ReplicaTarget(1, 4), 1)
    young = [name for name in world.pods(GROUPS["decode"]) if name not in world.workers]
    assert len(young) == 2
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    assert world.replicas() == (1, 3) and not any(w.is_draining for w in world.workers.values())
    assert len({*young} & {*world.ending}) == 1


async def test_draining_pods_are_replaced_when_more_are_needed_again(planner: Planner, world: World[Objects]) -> None:
    world.create(1, 4)
    await rounds(planner, world, ReplicaTarget(1, 3), 1)
    (drained_pod,) = [name for name, worker in world.workers.items() if worker.is_draining]
    seen = []
    for _ in range(10):
        await rounds(planner, world, ReplicaTarget(1, 4), 1)
        seen.append(world.replicas()[1])
    assert [*dict.fromkeys(seen)] == [5, 4], "not only when the leaver is empty"
    assert world.replicas() == (1, 4) and drained_pod not in world.pods()
    assert world.num_serving(GROUPS["decode"]) == 4
    assert max(published["decode"] for published in world.published) == 5 and world.published[-1]["decode"] == 4


async def test_a_new_leader_takes_no_pod_for_starting(make_planner: MakePlanner, world: World[Objects]) -> None:
    """A worker that only lost Redis still serves."""
    world.create(1, 2)
    hidden = world.pods(GROUPS["decode"])[1]
    world.hidden.add(hidden)
    leader = make_planner("p2")
    await rounds(leader, world, ReplicaTarget(1, 1), 1)
    assert not world.workers[hidden].is_draining and hidden not in world.ending


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enableInTreeAutoscaling": True}, "has Ray's autoscaler on"),
        ({"suspend": True}, "is suspended"),
    ],
)
async def test_a_cluster_that_is_somebody_else_s_is_left_alone(
    planner: Planner, world: World[Objects], change: dict[str, bool], message: str
) -> None:
    world.create(1, 2, **change)
    assert message in str(await planner.round(ReplicaTarget(4, 4)))
    assert world.replicas() == (1, 2)


async def test_a_group_that_is_not_there_is_named(planner: Planner, world: World[Objects]) -> None:
    world.create(1, 2)
    found = world.api.get("rayclusters", CLUSTER)
    found["spec"]["workerGroupSpecs"][1]["groupName"] = "other"
    world.api.put("rayclusters", CLUSTER, found)
    assert "no worker group decode-group" in str(await planner.round(ReplicaTarget(4, 4)))
    found["spec"]["workerGroupSpecs"][1] |= {"groupName": GROUPS["decode"], "numOfHosts": 2}
    world.api.put("rayclusters", CLUSTER, found)
    assert "2 hosts" in str(await planner.round(ReplicaTarget(4, 4)))


async def test_while_a_service_goes_over_to_another_cluster_nothing_is_changed(
    planner: Planner, world: World[Objects]
) -> None:
    world.create(1, 2)
    active, pending = {"rayClusterName": CLUSTER}, {"rayClusterName": "new"}
    world.set_service(activeServiceStatus=active, pendingServiceStatus=pending)
    assert "goes over from RayCluster llm-raycluster-x1 to new" in str(await planner.round(ReplicaTarget(4, 4)))
    world.set_service()
    assert "no cluster that serves yet" in str(await planner.round(ReplicaTarget(4, 4)))
    assert world.replicas() == (1, 2)


async def test_a_group_keeps_within_its_own_bounds(planner: Planner, world: World[Objects]) -> None:
    world.create(1, 2)
    done = await rounds(planner, world, ReplicaTarget(1, 30), 1)
    assert world.replicas() == (1, 20)
    assert "group decode-group may have 1 to 20 pods, not 30" in done.notes


async def test_pods_with_one_address_are_rejected(planner: Planner, world: World[Objects]) -> None:
    world.create(1, 2)
    one, other = world.pods(GROUPS["decode"])
    pod = world.api.get("pods", one)
    pod["status"]["podIP"] = world.api.get("pods", other)["status"]["podIP"]
    world.api.put("pods", one, pod)
    assert "which worker is in which is not known" in str(await planner.round(ReplicaTarget(1, 1)))
    assert not any(worker.is_draining for worker in world.workers.values())


async def test_kuberay_is_waited_for_before_a_group_shrinks(planner: Planner, world: World[Objects]) -> None:
    """Otherwise KubeRay would delete pods of its own choice."""
    world.create(1, 3)
    await planner.round(ReplicaTarget(1, 5))
    done = await planner.round(ReplicaTarget(1, 2))
    assert isinstance(done, ActuationResult) and any("does not shrink before KubeRay" in note for note in done.notes)
    assert world.replicas() == (1, 5)


async def test_roles_change_and_the_rest_is_started(planner: Planner, world: World[Objects]) -> None:
    world.create(3, 2)
    await planner.round(ReplicaTarget(2, 4), [RoleChange("prefill", "decode", 1)])
    assert [role for _, role in world.roles] == ["decode"]
    assert world.replicas() == (3, 3), "one more of a role where one was taken over"


async def test_of_two_planners_one_acts_and_the_other_takes_over(
    make_planner: MakePlanner, planner: Planner, world: World[Objects]
) -> None:
    world.create(1, 2)
    other = make_planner("p2")
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
    # One that stops in order leaves it at once.
    other.leadership.resign()
    assert (await planner.round(ReplicaTarget(4, 3))).outcome == "carried_out"  # type: ignore[union-attr]
