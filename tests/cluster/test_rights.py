"""Test on a real API server what the service accounts of a release may do: what their roles say, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.chart.release import CI, Object, Rendered, ci
from tests.cluster.kube_cluster import KubeCluster, Rest

pytestmark = pytest.mark.cluster

CORE, RAY, LEASES, RBAC = (
    "/api/v1",
    "/apis/ray.io/v1",
    "/apis/coordination.k8s.io/v1",
    "/apis/rbac.authorization.k8s.io/v1",
)
_VERBS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


class Call(NamedTuple):
    """A request of one verb. `path` has a place for the namespace."""

    verb: str
    path: str

    def status(self, rest: Rest, namespace: str) -> int:
        """Send the request, as a dry run if it would change anything; return the reply's status."""
        query: dict[str, Any] = {"watch": "true", "timeoutSeconds": 1} if self.verb == "watch" else {}
        if self.verb in ("create", "update", "patch", "delete"):
            query["dryRun"] = "All"
        body: Any = {"metadata": {"name": "absent"}} if self.verb in ("create", "update") else None
        is_patch = self.verb == "patch"
        content_type = "application/merge-patch+json" if is_patch else "application/json"
        path = self.path.format(namespace)
        return rest(_VERBS[self.verb], path, {} if is_patch else body, content_type=content_type, **query).status


NOBODY = [
    Call("get", f"{CORE}/namespaces/{{}}/secrets/absent"),
    Call("list", f"{CORE}/namespaces/{{}}/secrets"),
    Call("get", f"{CORE}/namespaces/{{}}/configmaps/absent"),
    Call("create", f"{CORE}/namespaces/{{}}/pods"),
    Call("delete", f"{CORE}/namespaces/{{}}/pods/absent"),
    Call("create", f"{CORE}/namespaces/{{}}/pods/absent/exec"),
    Call("create", f"{CORE}/namespaces/{{}}/pods/absent/eviction"),
    Call("get", f"{CORE}/namespaces/{{}}/pods/absent/log"),
    Call("create", f"{CORE}/namespaces/{{}}/serviceaccounts/default/token"),
    Call("list", f"{CORE}/namespaces/kube-system/pods"),
    Call("list", f"{RAY}/namespaces/default/rayclusters"),
    Call("get", f"{LEASES}/namespaces/kube-system/leases/absent"),
    Call("list", f"{CORE}/pods"),
    Call("list", f"{CORE}/nodes"),
    Call("list", f"{CORE}/namespaces"),
    Call("list", f"{RAY}/rayclusters"),
    Call("list", "/apis/apps/v1/namespaces/{}/deployments"),
    Call("patch", "/apis/apps/v1/namespaces/{}/deployments/absent"),
    Call("create", f"{RAY}/namespaces/{{}}/rayservices"),
    Call("patch", f"{RAY}/namespaces/{{}}/rayservices/absent"),
    Call("delete", f"{RAY}/namespaces/{{}}/rayservices/absent"),
    Call("create", f"{RAY}/namespaces/{{}}/rayclusters"),
    Call("delete", f"{RAY}/namespaces/{{}}/rayclusters/absent"),
    Call("delete", f"{LEASES}/namespaces/{{}}/leases/absent"),
    Call("create", f"{RBAC}/namespaces/{{}}/roles"),
    Call("create", f"{RBAC}/namespaces/{{}}/rolebindings"),
]
"""What no account may do: read secrets, run programs, reach other namespaces, remove what serves, extend its rights."""
OF_THE_PLANNER = [
    Call("get", f"{RAY}/namespaces/{{}}/rayclusters/absent"),
    Call("patch", f"{RAY}/namespaces/{{}}/rayclusters/absent"),
    Call("get", f"{RAY}/namespaces/{{}}/rayservices/absent"),
    Call("list", f"{CORE}/namespaces/{{}}/pods"),
    Call("watch", f"{CORE}/namespaces/{{}}/pods"),
    Call("get", f"{LEASES}/namespaces/{{}}/leases/absent"),
    Call("create", f"{LEASES}/namespaces/{{}}/leases"),
    Call("update", f"{LEASES}/namespaces/{{}}/leases/absent"),
]
BEYOND_THE_PLANNER = [
    Call("get", f"{CORE}/namespaces/{{}}/pods/absent"),
    Call("list", f"{RAY}/namespaces/{{}}/rayclusters"),
    Call("update", f"{RAY}/namespaces/{{}}/rayclusters/absent"),
    Call("patch", f"{RAY}/namespaces/{{}}/rayclusters/absent/status"),
    Call("list", f"{RAY}/namespaces/{{}}/rayservices"),
    Call("list", f"{LEASES}/namespaces/{{}}/leases"),
]
UNINSTALLING = ci("everything-on").one("rayservice")["metadata"]["name"]
OF_THE_UNINSTALLER = [
    Call("get", f"{RAY}/namespaces/{{}}/rayservices/{UNINSTALLING}"),
    Call("delete", f"{RAY}/namespaces/{{}}/rayservices/{UNINSTALLING}"),
    Call("list", f"{RAY}/namespaces/{{}}/rayclusters"),
]


def verbs_of(role: Object) -> set[tuple[str, str]]:
    return {(verb, plural) for rule in role["rules"] for plural in rule["resources"] for verb in rule["verbs"]}


def verb_of(call: Call) -> tuple[str, str]:
    parts = call.path.split("/{}/")[1].split("/")
    return call.verb, parts[0]


@pytest.fixture(scope="module")
def namespace(kube_cluster: KubeCluster) -> Iterator[str]:
    """Yield a namespace with the accounts, roles and bindings of two releases, the hook's among them."""
    with kube_cluster.namespace("rights") as name:
        for rendered in (ci("planner"), ci("everything-on")):
            for content in rendered.objects:
                if content["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
                    kube_cluster.must_apply(name, content)
        yield name


def as_account(cluster: KubeCluster, namespace: str, rendered: Rendered, template: str) -> Rest:
    name = rendered.one(template)["metadata"]["name"]
    return Rest(cluster.account(namespace, name))


def test_the_calls_tried_are_those_of_the_roles() -> None:
    assert {verb_of(call) for call in OF_THE_PLANNER} == verbs_of(ci("planner").one("planner-role"))
    assert {verb_of(call) for call in OF_THE_UNINSTALLER} == verbs_of(ci("everything-on").one("uninstall-role"))
    roles = {(name, one["metadata"]["name"]) for name in CI for one in ci(name).kinds("Role")}
    assert {name.rpartition("-")[2] for _, name in roles} == {"planner", "uninstall"}, "a role without a test"
    assert not any(ci(name).kinds(kind) for name in CI for kind in ("ClusterRole", "ClusterRoleBinding"))


@pytest.mark.parametrize("call", OF_THE_PLANNER, ids=" ".join)
def test_a_planner_may_do_what_it_needs(kube_cluster: KubeCluster, namespace: str, call: Call) -> None:
    rest = as_account(kube_cluster, namespace, ci("planner"), "planner-serviceaccount")
    assert call.status(rest, namespace) in (200, 201, 404)


@pytest.mark.parametrize("call", [*NOBODY, *BEYOND_THE_PLANNER], ids=" ".join)
def test_a_planner_may_do_nothing_else(kube_cluster: KubeCluster, namespace: str, call: Call) -> None:
    rest = as_account(kube_cluster, namespace, ci("planner"), "planner-serviceaccount")
    assert call.status(rest, namespace) == 403


@pytest.mark.parametrize("call", OF_THE_UNINSTALLER, ids=" ".join)
def test_the_hook_may_do_what_it_needs(kube_cluster: KubeCluster, namespace: str, call: Call) -> None:
    rest = as_account(kube_cluster, namespace, ci("everything-on"), "uninstall-serviceaccount")
    assert call.status(rest, namespace) in (200, 404)


@pytest.mark.parametrize("call", [*NOBODY, *OF_THE_PLANNER], ids=" ".join)
def test_the_hook_may_do_nothing_else(kube_cluster: KubeCluster, namespace: str, call: Call) -> None:
    rest = as_account(kube_cluster, namespace, ci("everything-on"), "uninstall-serviceaccount")
    assert call.status(rest, namespace) == 403


@pytest.mark.parametrize("template", ["gateway-serviceaccount", "worker-serviceaccount"])
def test_gateways_and_workers_may_do_nothing(kube_cluster: KubeCluster, namespace: str, template: str) -> None:
    rest = as_account(kube_cluster, namespace, ci("planner"), template)
    for call in (*NOBODY, *OF_THE_PLANNER, *BEYOND_THE_PLANNER, *OF_THE_UNINSTALLER):
        assert call.status(rest, namespace) == 403, call


def test_a_planner_of_serve_has_no_rights(kube_cluster: KubeCluster, namespace: str) -> None:
    rest = as_account(kube_cluster, namespace, ci("everything-on"), "planner-serviceaccount")
    for call in (*NOBODY, *OF_THE_PLANNER):
        assert call.status(rest, namespace) == 403, call
