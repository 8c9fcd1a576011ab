"""Test the planner's Kubernetes client, and what an API server answers to it, on the double and on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import incluster_config, kube_config

from tandem.planner.kube_client import KubeApi, connect
from tandem.planner.kube_error import Backoff, KubeError
from tandem.planner.leader_election import Election
from tandem.planner.lease_keeper import LeaseKeeper
from tandem.planner.pod_watch import PodInformer
from tandem.planner.ray_cluster import ClusterFinder
from tests.unit.planner.api_servers import ApiServer, RealObjects
from tests.unit.planner.kube_server import KubeServer
from tests.unit.planner.world import CLUSTER, SERVICE, Objects, Tick, World

LEASE = "tandem-planner"


@pytest.fixture
def api(api_server: ApiServer) -> Iterator[KubeApi]:
    made = api_server.connect("p1")
    yield made
    made.close()


@pytest.fixture
def world(api_server: ApiServer) -> World[Objects]:
    return World(api_server.objects)


def keeper(api: KubeApi, who: str, clock: Tick, failures: list[KubeError]) -> LeaseKeeper:
    def informer(selector: str) -> PodInformer:
        return PodInformer(api, selector, clock, Backoff(lambda: 0.0))

    owner = ClusterFinder(api, SERVICE, "", (), informer).owner
    return LeaseKeeper(Election(who, 15.0), api, LEASE, clock, owner, failures.append)


def test_in_a_pod_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each line of a pod's log must be JSON."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    for name in ("SERVICE_TOKEN_FILENAME", "SERVICE_CERT_FILENAME"):
        (tmp_path / name).write_text("content")
        monkeypatch.setattr(incluster_config, name, str(tmp_path / name))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    connect("serving", "p", 1.0).close()
    assert capfd.readouterr() == ("", "")


# ---- Leases


def test_a_lease_is_read_as_it_was_written(api: KubeApi) -> None:
    assert api.read_lease(LEASE) is None
    created = api.create_lease(LEASE, "p1", 15.0)
    assert (created.holder, created.lease_s, created.num_changes) == ("p1", 15.0, 0)
    assert created.version and created.renewed and created.acquired == created.renewed
    assert api.read_lease(LEASE) == created
    renewed = api.replace_lease(LEASE, replace(created, num_changes=1))
    assert renewed.num_changes == 1 and renewed.version != created.version and renewed.acquired == created.acquired
    assert api.read_lease(LEASE) == renewed


def test_a_lease_that_changed_meanwhile_is_a_conflict(api: KubeApi) -> None:
    created = api.create_lease(LEASE, "p1", 15.0)
    with pytest.raises(KubeError) as again:
        api.create_lease(LEASE, "p2", 15.0)
    taken = api.replace_lease(LEASE, replace(created, holder="p2"))
    with pytest.raises(KubeError) as stale:
        api.replace_lease(LEASE, created)
    assert [error.value.status for error in (again, stale)] == [409, 409]
    assert again.value.is_conflict and stale.value.is_conflict
    assert api.read_lease(LEASE) == taken


def test_two_candidates_hold_a_lease_one_after_the_other(
    api: KubeApi, api_server: ApiServer, world: World[Objects]
) -> None:
    world.set_service()
    clock, failures = Tick(), list[KubeError]()
    other_api = api_server.connect("p2")
    one, other = keeper(api, "p1", clock, failures), keeper(other_api, "p2", clock, failures)
    for each in (one, other, one):
        each.look()
    assert one.leads and not other.leads and other.election.holder == "p1"
    clock.at += 14.9
    one.look()
    other.look()
    assert one.leads and not other.leads, "it was renewed in time"
    # The first one says nothing for the length of the Lease.
    clock.at += 15.0
    other.look()
    assert other.leads and not one.leads
    one.look()
    assert not one.leads and one.election.holder == "p2"
    # The second one gives it up.
    other.resign()
    released = api.read_lease(LEASE)
    assert released is not None and released.holder == ""
    one.look()
    assert one.leads and not other.leads and failures == []
    other_api.close()
    # It refers to the RayService, whoever holds it.
    kept = api.read_lease(LEASE)
    assert kept is not None and kept.num_changes == 2
    service = api_server.objects.get("rayservices", SERVICE)
    assert [(owner["kind"], owner["uid"]) for owner in kept.owners] == [("RayService", service["metadata"]["uid"])]


def test_a_lease_without_an_owner_gets_one(api: KubeApi, world: World[Objects]) -> None:
    world.set_service()
    api.create_lease(LEASE, "p1", 15.0)
    one = keeper(api, "p1", Tick(), failures := list[KubeError]())
    one.look()
    kept = api.read_lease(LEASE)
    assert one.leads and kept is not None and [owner["name"] for owner in kept.owners] == [SERVICE]
    assert not failures


def test_no_planner_leads_without_a_rayservice(api: KubeApi, world: World[Objects]) -> None:
    failures = list[KubeError]()
    one = keeper(api, "p1", Tick(), failures)
    one.look()
    assert not one.leads and api.read_lease(LEASE) is None
    assert [error.status for error in failures] == [404]
    world.set_service()
    one.look()
    assert one.leads


def test_a_lease_with_an_invalid_name_is_reported_once_as_an_error(
    api: KubeApi, world: World[Objects], caplog: pytest.LogCaptureFixture
) -> None:
    world.set_service()
    failures = list[KubeError]()
    leadership = keeper(api, "p1", Tick(), failures)
    leadership.name = "Not_A_Name"
    for _ in range(3):
        leadership.look()
    assert not leadership.leads and [error.label for error in failures] == ["invalid"] * 3
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Not_A_Name" in record.message and "neither take nor renew" in record.message


# ---- Ray's objects


def test_ray_s_objects_are_read(api: KubeApi, world: World[Objects]) -> None:
    world.create(1, 2)
    assert [group["replicas"] for group in api.read_cluster(CLUSTER)["spec"]["workerGroupSpecs"]] == [1, 2]
    assert api.read_service(SERVICE)["status"]["activeServiceStatus"]["rayClusterName"] == CLUSTER
    for read in (api.read_cluster, api.read_service):
        with pytest.raises(KubeError) as error:
            read("missing")
        assert error.value.status == 404 and not error.value.is_conflict and not error.value.is_transient


REPLICAS = "/spec/workerGroupSpecs/{}/replicas"
GROW = {"op": "add", "path": REPLICAS.format(0), "value": 3}


def test_a_patch_names_the_version_that_it_is_for(api: KubeApi, world: World[Objects]) -> None:
    world.create(1, 2)
    version = api.read_cluster(CLUSTER)["metadata"]["resourceVersion"]
    names_version = {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
    api.patch_cluster(CLUSTER, [GROW, names_version])
    assert world.replicas() == (3, 2)
    with pytest.raises(KubeError) as error:
        api.patch_cluster(CLUSTER, [{**GROW, "value": 4}, names_version])
    assert error.value.status == 409 and error.value.is_conflict and not error.value.is_invalid
    assert world.replicas() == (3, 2)


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/spec/rayVersion", "value": "another"},
        {"op": "test", "path": "/spec/workerGroupSpecs/0/groupName", "value": "another"},
        {"op": "test", "path": "/spec/workerGroupSpecs/7/groupName", "value": "prefill-group"},
        {"op": "replace", "path": "/spec/gcsFaultToleranceOptions/redisAddress", "value": "redis:6379"},
    ],
    ids=str,
)
def test_a_patch_that_does_not_fit_the_object_is_a_conflict(
    api: KubeApi, world: World[Objects], operation: dict[str, Any]
) -> None:
    world.create(1, 2)
    with pytest.raises(KubeError) as error:
        api.patch_cluster(CLUSTER, [GROW, operation])
    assert error.value.status == 422 and error.value.is_conflict and not error.value.is_invalid
    assert world.replicas() == (1, 2), "no part of it was applied"


def test_a_patch_may_replace_a_key_that_is_not_there(api: KubeApi, world: World[Objects]) -> None:
    world.create(1, 2)
    api.patch_cluster(CLUSTER, [{"op": "replace", "path": "/spec/suspend", "value": True}])
    assert api.read_cluster(CLUSTER)["spec"]["suspend"] is True


@pytest.mark.parametrize("value", ["two", 1.5, [1]], ids=str)
def test_a_patch_that_the_schema_refuses_is_invalid(api: KubeApi, world: World[Objects], value: Any) -> None:
    if isinstance(world.api, KubeServer) and not world.api.has_schemas:
        pytest.skip("the double has no schemas of KubeRay: TANDEM_CRDS says where they are")
    world.create(1, 2)
    with pytest.raises(KubeError) as error:
        api.patch_cluster(CLUSTER, [GROW, {"op": "add", "path": REPLICAS.format(1), "value": value}])
    assert error.value.status == 422 and error.value.is_invalid and not error.value.is_conflict
    assert world.replicas() == (1, 2)


# ---- pods


def test_pods_are_listed_and_watched_by_their_labels(api: KubeApi, world: World[Objects]) -> None:
    world.create(1, 1)
    pods, version = api.list_pods("ray.io/group=decode-group")
    (pod,) = pods
    assert pod.group == "decode-group" and pod.ip.startswith("10.0.") and not pod.is_ending
    one, other = world.pods("decode-group")[0], world.pods("prefill-group")[0]
    world.end(other)
    world.end(one)
    world.lose(other)
    world.lose(one)
    stream = api.watch_pods("ray.io/group=decode-group", version, 30)
    seen = []
    for event in stream:
        if event.kind != "BOOKMARK":
            seen.append(event)
        if event.kind == "DELETED":
            break
    stream.cut()
    assert {event.pod.name for event in seen if event.pod is not None} == {one}
    assert [*dict.fromkeys(event.kind for event in seen)] == ["MODIFIED", "DELETED"]
    assert all(event.pod is not None and event.pod.is_ending for event in seen)
    assert int(seen[-1].version) > int(version)


def test_a_watch_from_a_version_that_is_forgotten_is_gone(api: KubeApi, world: World[Objects]) -> None:
    world.create(1, 1)
    try:
        seen = list(api.watch_pods("", "1", 5))
    except KubeError as error:
        assert error.is_gone
    else:
        assert seen and isinstance(world.api, RealObjects), "neither an error nor the events since then"
        pytest.skip("this API server remembers its first version, because it has not been restarted since")


def test_a_watch_that_shows_no_change_has_bookmarks(api: KubeApi, world: World[Objects]) -> None:
    """A bookmark has the version of a change that the selector leaves out. Kubernetes does not promise one in each
    watch."""
    world.create(1, 1)
    _, version = api.list_pods("ray.io/group=decode-group")
    (other,) = world.pods("prefill-group")
    world.end(other)
    changed = world.api.get("pods", other)["metadata"]["resourceVersion"]
    streams = (api.watch_pods("ray.io/group=decode-group", version, 20) for _ in range(6))
    event = next((event for stream in streams for event in stream), None)
    assert event is not None and event.kind == "BOOKMARK" and event.pod is None
    assert int(event.version) >= int(changed) > int(version)
