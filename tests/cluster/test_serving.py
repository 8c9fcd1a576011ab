"""Test a release that serves on a real cluster: Helm's tests, lost pods, upgrades and the planner under load.

They need nodes, KubeRay's operator and the images of deploy/. TANDEM_CLUSTER_VALUES names a file of values for them,
for example with the registry of the images.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import urllib3

from tests.chart.release import CI, RELEASE
from tests.cluster.kube_cluster import RESTRICTED, KubeCluster, Reply, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(5400)]

NAME = f"{RELEASE}-tandem"
BODY = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
START_S = 1800.0
"""Longest wait until pods serve, which download a model first."""
SETTLE_S = 20.0
"""How long the load goes on before and after a fault."""
SETTINGS: dict[str, Any] = {
    # Without a target of its own a pool grows by `planner.headroom` alone, however slow the nodes are.
    "slo.itl_ms": 0,
    "gateway.replicas": 2,
    "ray.inTreeAutoscaling.enabled": False,
    "planner.enabled": True,
    "planner.mode": "act",
    "planner.actuator": "raycluster",
    "planner.scale_down_s": 30,
    "pools.decode.maxReplicas": 2,
    "pools.prefill.maxReplicas": 1,
}


@dataclass
class Serving:
    """A release that serves."""

    cluster: KubeCluster
    namespace: str

    def upgrade(self, changes: Mapping[str, Any]) -> None:
        self.cluster.upgrade(self.namespace, CI["cpu-trial"], *options(changes))

    def complete(self) -> Reply:
        """Send a completion through the API server's proxy of services."""
        path = f"/api/v1/namespaces/{self.namespace}/services/{NAME}-gateway:http/proxy/v1/completions"
        return self.cluster.rest("POST", path, BODY, headers={"x-api-key": self.key}, timeout_s=180)

    @property
    def key(self) -> str:
        secret = self.cluster.rest.must("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{NAME}-tenants")
        return base64.b64decode(secret["data"]["key"]).decode()

    def items(self, api_version: str, kind: str, **query: str) -> list[Any]:
        path = self.cluster.kinds[api_version, kind].path(self.namespace)
        items: list[Any] = self.cluster.rest.must("GET", path, **query)["items"]
        return items

    def ray_cluster(self) -> str:
        """Return the name of the RayCluster that serves."""
        (service,) = self.items("ray.io/v1", "RayService")
        return str(service.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName", ""))

    def workers(self, pool: str) -> list[str]:
        """Return the names of the pods of a pool that are ready."""
        pods = self.items("v1", "Pod", labelSelector=f"ray.io/cluster={self.ray_cluster()},ray.io/node-type=worker")
        ready = [
            pod
            for pod in pods
            if any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
        ]
        return [pod["metadata"]["name"] for pod in ready if pool in pod["metadata"]["labels"]["ray.io/group"]]

    def wait_until_it_serves(self) -> None:
        """Wait until a prefill and a decode worker answer together, and KubeRay says that their cluster serves."""

        def serves() -> bool:
            try:
                reply = self.complete()
            except urllib3.exceptions.HTTPError:
                return False
            is_remote = reply.status == 200 and reply.body["tandem"]["path"] == "remote"
            return is_remote and all(len(self.workers(pool)) == 1 for pool in ("prefill", "decode"))

        wait_for(serves, "no completion goes from a prefill to a decode worker", START_S)

    def group(self, pool: str) -> dict[str, Any]:
        """Return the specification of a pool's worker group in the RayCluster that serves."""
        clusters = {one["metadata"]["name"]: one["spec"] for one in self.items("ray.io/v1", "RayCluster")}
        groups: list[dict[str, Any]] = clusters[self.ray_cluster()]["workerGroupSpecs"]
        (found,) = [group for group in groups if pool in group["groupName"]]
        return found

    @contextmanager
    def load(self, num_clients: int = 4) -> Iterator[None]:
        """Send completions while the block runs and for a while before and after; none may fail."""
        ended = threading.Event()
        statuses = Counter[Any]()

        def send_until_the_end() -> None:
            while not ended.is_set():
                try:
                    reply = self.complete()
                    result: Any = reply.status if reply.status == 200 else (reply.status, reply.message)
                except Exception as error:
                    result = repr(error)
                statuses[result] += 1
                ended.wait(0.05)

        clients = [threading.Thread(target=send_until_the_end) for _ in range(num_clients)]
        for each in clients:
            each.start()
        try:
            time.sleep(SETTLE_S)
            yield
            time.sleep(SETTLE_S)
        finally:
            ended.set()
            for each in clients:
                each.join()
        assert statuses.keys() == {200}, statuses


def options(changes: Mapping[str, Any]) -> list[str]:
    """Return Helm's options for the settings of these tests, with changes."""
    extra = os.environ.get("TANDEM_CLUSTER_VALUES")
    given = [f"{name}={json.dumps(value)}" for name, value in (SETTINGS | dict(changes)).items()]
    return [*(("-f", extra) if extra else ()), *(part for each in given for part in ("--set-json", each))]


@pytest.fixture(scope="module")
def serving(kube_cluster: KubeCluster) -> Iterator[Serving]:
    if not kube_cluster.has_ready_node:
        pytest.skip("no node of the cluster is Ready, so no pod can run")
    if not kube_cluster.has_kuberay:
        pytest.skip("KubeRay's operator does not run on the cluster")
    with kube_cluster.namespace("serving", RESTRICTED) as namespace:
        kube_cluster.install(namespace, CI["cpu-trial"], *options({}))
        made = Serving(kube_cluster, namespace)
        made.wait_until_it_serves()
        yield made
        kube_cluster.uninstall(namespace, with_hook=True)


def test_a_completion_goes_from_a_prefill_to_a_decode_worker(serving: Serving) -> None:
    reply = serving.complete()
    assert reply.status == 200 and reply.body["choices"][0]["text"] and reply.body["tandem"]["path"] == "remote"


def test_helm_s_tests_pass(serving: Serving) -> None:
    serving.cluster.helm("test", RELEASE, "-n", serving.namespace, "--logs", "--timeout", "15m", timeout_s=1000)


def test_no_request_fails_when_the_prefill_pod_is_killed(serving: Serving) -> None:
    (pod,) = serving.workers("prefill")
    with serving.load():
        path = serving.cluster.kinds["v1", "Pod"].path(serving.namespace, pod)
        serving.cluster.rest.must("DELETE", path, gracePeriodSeconds=0)
        wait_for(lambda: serving.workers("prefill") not in ([], [pod]), "no other prefill pod is ready", START_S)


def test_the_planner_grows_and_shrinks_a_pool_and_no_request_fails(serving: Serving) -> None:
    with serving.load():
        # As good as all of a worker is to be kept free, so any load needs a second one.
        serving.upgrade({"planner.headroom": 0.999})
        wait_for(lambda: len(serving.workers("decode")) == 2, "the planner does not add a decode pod", START_S)
    with serving.load(num_clients=1):
        serving.upgrade({})
        # Not the number of ready pods alone, because a probe may fail once.
        wait_for(lambda: serving.group("decode")["replicas"] == 1, "the planner does not shrink the pool", START_S)
        listed = serving.group("decode").get("scaleStrategy", {}).get("workersToDelete", ())
        assert len(listed) == 1, "the planner names the pod that goes, which it has drained"
        wait_for(lambda: not {*serving.workers("decode")} & {*listed}, "KubeRay does not delete the pod", START_S)


def test_no_request_fails_when_the_rayservice_is_upgraded(serving: Serving) -> None:
    before = serving.ray_cluster()
    with serving.load():
        serving.upgrade({"poolDefaults.podAnnotations.rotated": "again"})
        wait_for(lambda: serving.ray_cluster() not in ("", before), "no second Ray cluster serves", START_S)
        wait_for(lambda: len(serving.items("ray.io/v1", "RayCluster")) == 1, "the first Ray cluster stays", START_S)
