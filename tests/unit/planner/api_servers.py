"""Give tests of the planner an API server: the double, and in `make cluster` the one of TANDEM_KUBECONFIG too.

What a test finds true of both, the double does as Kubernetes does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client

from tests.chart.release import ci
from tests.cluster.kube_cluster import KUBECONFIG, KubeCluster, Rest, wait_for, write_kubeconfig
from tests.unit.planner.kube_server import Object, kube_server
from tests.unit.planner.rig import Connect, connects
from tests.unit.planner.world import Objects

_PREFIXES = {
    "pods": "/api/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "rayclusters": "/apis/ray.io/v1",
    "rayservices": "/apis/ray.io/v1",
}
_FINALIZER = "tandem.test/ends"
"""Keeps a deleted pod until the test lets it go, as a pod does whose containers still run."""


@dataclass(frozen=True)
class ApiServer:
    """API server for planners. `objects`: what the cluster itself does there; `connect`: planners."""

    objects: Objects
    settings: client.Configuration
    namespace: str

    @property
    def connect(self) -> Connect:
        return connects(self.settings, self.namespace)

    def write_kubeconfig(self, path: Path) -> Path:
        return write_kubeconfig(self.settings, path)


class RealObjects:
    """Act on the objects of a real API server as a cluster does, in one namespace; KubeServer does so in the double."""

    def __init__(self, cluster: KubeCluster, namespace: str) -> None:
        self.lock = threading.RLock()
        self.wrote: Callable[[str, Object | None, Object], None] = lambda who, before, after: None
        self._rest = cluster.rest
        self._namespace = namespace

    def put(self, plural: str, name: str, content: Object) -> Object:
        """Write an object whatever its version, and its status."""
        metadata = {key: value for key, value in content.get("metadata", {}).items() if key != "deletionTimestamp"}
        made = {**content, "metadata": {**metadata, "name": name}}
        if plural == "pods":
            made["metadata"]["finalizers"] = [_FINALIZER]
        if name not in self.names(plural):
            self._rest.must("POST", self._path(plural), made)
        elif plural != "pods":
            made["metadata"]["resourceVersion"] = self.get(plural, name)["metadata"]["resourceVersion"]
            self._rest.must("PUT", self._path(plural, name), made)
        if "status" in content:
            status = [{"op": "add", "path": "/status", "value": content["status"]}]
            patch = {"content_type": "application/json-patch+json"}
            self._rest.must("PATCH", f"{self._path(plural, name)}/status", status, **patch)
        if "deletionTimestamp" in content.get("metadata", {}):
            self._rest.must("DELETE", self._path(plural, name))
        return self.get(plural, name)

    def delete(self, plural: str, name: str) -> None:
        path = self._path(plural, name)
        self._rest("DELETE", path, gracePeriodSeconds=0)
        self._rest("PATCH", path, {"metadata": {"finalizers": None}}, content_type="application/merge-patch+json")
        wait_for(lambda: self._rest("GET", path).status == 404, f"{plural} {name} is not deleted")

    def get(self, plural: str, name: str) -> Object:
        found: Object = self._rest.must("GET", self._path(plural, name))
        return found

    def names(self, plural: str) -> list[str]:
        items = self._rest.must("GET", self._path(plural))["items"]
        return [item["metadata"]["name"] for item in items]

    def clear(self) -> None:
        for plural in _PREFIXES:
            for name in self.names(plural):
                self.delete(plural, name)

    def _path(self, plural: str, name: str = "") -> str:
        return f"{_PREFIXES[plural]}/namespaces/{self._namespace}/{plural}{f'/{name}' if name else ''}"


@functools.cache
def _real_server(cluster: KubeCluster) -> tuple[RealObjects, ApiServer]:
    """Make a namespace of the cluster, and access to it with the rights that the chart gives to planners."""
    namespace = cluster.enter_namespace("planners")
    rendered = ci("planner")
    account = rendered.one("planner-serviceaccount")["metadata"]["name"]
    for kind in ("serviceaccount", "role", "rolebinding"):
        cluster.must_apply(namespace, rendered.one(f"planner-{kind}"))
    objects, settings = RealObjects(cluster, namespace), cluster.account(namespace, account)
    pods = cluster.kinds["v1", "Pod"].path(namespace)
    wait_for(lambda: Rest(settings)("GET", pods).status == 200, "the role of planners does not hold")
    return objects, ApiServer(objects, settings, namespace)


@pytest.fixture(params=["double", *([pytest.param("real", marks=pytest.mark.cluster)] if KUBECONFIG else [])])
def api_server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """Yield an API server without objects."""
    if request.param == "double":
        with kube_server() as (double, url):
            settings = client.Configuration(host=url, api_key={"BearerToken": "Bearer x"})
            yield ApiServer(double, settings, "default")
    else:
        objects, server = _real_server(request.getfixturevalue("kube_cluster"))
        yield server
        objects.clear()
