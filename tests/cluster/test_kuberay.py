"""Test a release on a cluster whose KubeRay operator runs; no node is needed, because pods need not start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tandem.planner.kube_client import KubeApi
from tandem.planner.worker_group import GroupPatch, GroupView
from tests.chart.release import CI, ci
from tests.cluster.kube_cluster import RESTRICTED, KubeCluster, wait_for

pytestmark = pytest.mark.cluster

NAME = "planner"
FIRST_S = 30.0
"""Seconds in which an operator creates the RayCluster of a RayService."""


@dataclass
class Installed:
    """The release of the planner's example, of which KubeRay has created the RayCluster."""

    cluster: KubeCluster
    namespace: str

    def ray_clusters(self) -> list[str]:
        path = self.cluster.kinds["ray.io/v1", "RayCluster"].path(self.namespace)
        return [item["metadata"]["name"] for item in self.cluster.rest.must("GET", path)["items"]]

    def pods(self, group: str) -> set[str]:
        path = self.cluster.kinds["v1", "Pod"].path(self.namespace)
        found = self.cluster.rest.must("GET", path, labelSelector=f"ray.io/group={group}")["items"]
        return {pod["metadata"]["name"] for pod in found}


@pytest.fixture(scope="module")
def installed(kube_cluster: KubeCluster) -> Iterator[Installed]:
    with kube_cluster.namespace("kuberay", RESTRICTED) as namespace:
        kube_cluster.install(namespace, CI[NAME])
        made = Installed(kube_cluster, namespace)
        try:
            wait_for(lambda: bool(made.ray_clusters()), "no operator", FIRST_S)
        except AssertionError:
            pytest.skip(f"KubeRay's operator does not run: a RayService has no RayCluster after {FIRST_S:.0f} s")
        yield made
        kube_cluster.uninstall(namespace)


def test_the_pods_that_kuberay_makes_are_admitted_where_pods_are_restricted(installed: Installed) -> None:
    """KubeRay adds to the pods of the chart."""
    ray = ci(NAME).ray["rayClusterConfig"]
    expected: dict[str, int] = {one["groupName"]: one["replicas"] for one in ray["workerGroupSpecs"]} | {"headgroup": 1}
    wait_for(
        lambda: {group: len(installed.pods(group)) for group in expected} == expected,
        f"not the pods expected: {expected}",
        120,
    )


def test_kuberay_deletes_the_pods_that_a_planner_names_and_no_others(installed: Installed) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    account = ci(NAME).one("planner-serviceaccount")["metadata"]["name"]
    api = KubeApi(cluster.account(namespace, account), namespace, "p1", 10.0)
    (name,) = installed.ray_clusters()

    def group() -> GroupView:
        found = GroupView.of(api.read_cluster(name), "decode")
        assert found is not None
        return found

    api.patch_cluster(name, GroupPatch(replicas=3, listed=()).operations(group()))
    wait_for(lambda: len(installed.pods("decode")) == 3, "KubeRay does not add pods", 120)
    before = installed.pods("decode")
    named = sorted(before)[1]
    api.patch_cluster(name, GroupPatch(replicas=2, listed=(named,)).operations(group()))
    wait_for(lambda: named not in installed.pods("decode"), "KubeRay does not delete the pod", 120)
    assert installed.pods("decode") == before - {named}
    api.close()
