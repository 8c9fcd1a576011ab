"""Test on a real API server what runs before a release is uninstalled, with the rights that the chart gives to it."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from kubernetes import client, config

from tests.chart.release import CHART, Object, ci
from tests.cluster.kube_cluster import KubeCluster
from tests.unit.planner.world import NOT_KUBERAY

pytestmark = pytest.mark.cluster


def test_it_ends_the_clusters_of_its_rayservice_and_no_others(
    kube_cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = ci("everything-on")
    name = rendered.one("rayservice")["metadata"]["name"]
    with kube_cluster.namespace("uninstall") as namespace:
        for kind in ("serviceaccount", "role", "rolebinding"):
            kube_cluster.must_apply(namespace, rendered.one(f"uninstall-{kind}"))
        path = kube_cluster.kinds["ray.io/v1", "RayService"].path(namespace)
        service = kube_cluster.rest.must("POST", path, _ray("RayService", name, rayClusterConfig=_cluster()))
        owner = {"apiVersion": "ray.io/v1", "kind": "RayService", "name": name, "uid": service["metadata"]["uid"]}
        clusters = kube_cluster.kinds["ray.io/v1", "RayCluster"].path(namespace)
        kube_cluster.rest.must("POST", clusters, _ray("RayCluster", "another", **_cluster()))
        owned = _ray("RayCluster", f"{name}-1", **_cluster())
        owned["metadata"]["ownerReferences"] = [owner]
        kube_cluster.rest.must("POST", clusters, owned)

        settings = kube_cluster.account(namespace, rendered.one("uninstall-serviceaccount")["metadata"]["name"])
        monkeypatch.setattr(config, "load_incluster_config", lambda: client.Configuration.set_default(settings))
        for variable, value in {"RAYSERVICE": name, "POD_NAMESPACE": namespace, "TIMEOUT_S": "120"}.items():
            monkeypatch.setenv(variable, value)
        try:
            assert runpy.run_path(str(CHART / "files/hooks/delete_rayservice.py"))["main"]() == 0
        finally:
            client.Configuration.set_default(None)
        left = [item["metadata"]["name"] for item in kube_cluster.rest.must("GET", clusters)["items"]]
        assert left == ["another"] and kube_cluster.rest("GET", f"{path}/{name}").status == 404


def _cluster() -> Object:
    pod = {"spec": {"containers": [{"name": "ray", "image": "tandem-worker:0.1.0"}]}}
    return {"headGroupSpec": {"rayStartParams": {}, "template": pod}}


def _ray(kind: str, name: str, **spec: Any) -> Object:
    spec["managedBy"] = NOT_KUBERAY
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
