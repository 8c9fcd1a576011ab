"""Test releases of the chart on a real API server: validation, installation, upgrades, rollback, uninstallation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest

from tests.chart.release import CI, RELEASE, Object, Rendered, ci, pods
from tests.cluster.kube_cluster import RESTRICTED, KubeCluster, wait_for

pytestmark = pytest.mark.cluster
EACH = pytest.mark.parametrize("name", CI)
FIRST = "cpu-trial"
UPGRADES = ["planner", "mixed", "external-redis", "rdma", "one-node-nvlink", "everything-off", "everything-on"]


@pytest.fixture(scope="module")
def namespace(kube_cluster: KubeCluster) -> Iterator[str]:
    """Yield a namespace in which nothing is kept."""
    with kube_cluster.namespace("objects") as name:
        yield name


@EACH
def test_every_object_passes_strict_validation(kube_cluster: KubeCluster, namespace: str, name: str) -> None:
    objects = ci(name).objects
    kube_cluster.require_kinds(objects)
    for one in objects:
        reply = kube_cluster.apply(namespace, one, dryRun="All")
        assert reply.status in (200, 201), f"{one['kind']} {one['metadata']['name']}: {reply.message}"


def test_that_validation_refuses_a_key_that_is_nowhere_in_the_schema(kube_cluster: KubeCluster, namespace: str) -> None:
    for template in ("rayservice", "gateway-deployment"):
        broken = copy.deepcopy(ci(FIRST).one(template))
        broken["spec"]["replica"] = 1
        reply = kube_cluster.apply(namespace, broken, dryRun="All")
        assert reply.status in (400, 422, 500) and "replica" in reply.message, reply


@EACH
def test_a_release_fits_a_restricted_namespace_and_leaves_nothing(kube_cluster: KubeCluster, name: str) -> None:
    rendered = ci(name)
    kube_cluster.require_kinds(rendered.objects)
    with kube_cluster.namespace(name, RESTRICTED) as namespace:
        before = kube_cluster.contents(namespace)
        kube_cluster.install(namespace, CI[name])
        assert owned(kube_cluster, namespace) == identities(kube_cluster, rendered)
        admit_pods(kube_cluster, namespace, rendered)
        kube_cluster.uninstall(namespace)
        kube_cluster.wait_for_contents(namespace, before)


def admit_pods(cluster: KubeCluster, namespace: str, rendered: Rendered) -> None:
    """Let the server admit each pod of a release as a dry run: all but those on the host network."""
    if rendered.has("uninstall-serviceaccount"):
        cluster.must_apply(namespace, rendered.one("uninstall-serviceaccount"))
    for number, (where, pod) in enumerate(pods(rendered.objects)):
        spec = {
            key: value
            for key, value in pod["spec"].items()
            # Classes are objects of the cluster's administrator, which must exist.
            if key not in ("priorityClassName", "runtimeClassName")
        }
        content = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": spec}
        path = cluster.kind(content).path(namespace)
        reply = cluster.rest("POST", path, content, dryRun="All", fieldValidation="Strict")
        if spec.get("hostNetwork"):
            assert reply.status == 403 and "violates PodSecurity" in reply.message, f"{where}: {reply}"
        else:
            assert reply.status == 201, f"{where}: {reply.message}"
    if rendered.has("uninstall-serviceaccount"):
        account = rendered.one("uninstall-serviceaccount")
        cluster.rest.must("DELETE", cluster.kind(account).path(namespace, account["metadata"]["name"]))


def test_upgrades_through_all_files_and_a_rollback_keep_what_was_generated(kube_cluster: KubeCluster) -> None:
    for name in CI:
        kube_cluster.require_kinds(ci(name).objects)
    with kube_cluster.namespace("upgrades", RESTRICTED) as namespace:
        before = kube_cluster.contents(namespace)
        kube_cluster.install(namespace, CI[FIRST])
        secrets, specs = generated(kube_cluster, namespace), specs_of(kube_cluster, namespace)
        assert len(secrets) == 3 and all(secrets.values())
        earlier = secrets
        for name in UPGRADES:
            kube_cluster.upgrade(namespace, CI[name])
            assert owned(kube_cluster, namespace) == identities(kube_cluster, ci(name)), name
            now = generated(kube_cluster, namespace)
            for secret in now.keys() & earlier.keys():
                assert now[secret] == earlier[secret], f"the upgrade to {name} generated {secret} again"
            earlier = now
        # Helm would take an object that is still being deleted for one of the first revision.
        wait_for(lambda: not being_deleted(kube_cluster, namespace), "objects are left")
        kube_cluster.helm("rollback", RELEASE, "1", "-n", namespace)
        assert generated(kube_cluster, namespace) == secrets and specs_of(kube_cluster, namespace) == specs
        kube_cluster.upgrade(namespace, CI["planner"])
        assert generated(kube_cluster, namespace) == secrets, "what a rollback restored is kept as well"
        kube_cluster.uninstall(namespace)
        kube_cluster.wait_for_contents(namespace, before)


def identities(cluster: KubeCluster, rendered: Rendered) -> set[tuple[str, str]]:
    """Return plural and name of the objects that a release has, without its hooks."""
    objects = [one for one in rendered.objects if "helm.sh/hook" not in one["metadata"].get("annotations", {})]
    return {(cluster.kind(one).plural, one["metadata"]["name"]) for one in objects}


@functools.cache
def _plurals(cluster: KubeCluster) -> dict[str, str]:
    """Return the paths of the kinds that the chart has, by plural."""
    kinds = {cluster.kind(one) for name in CI for one in ci(name).objects}
    return {kind.plural: f"{kind.prefix}/namespaces/{{}}/{kind.plural}" for kind in kinds}


def owned(cluster: KubeCluster, namespace: str) -> set[tuple[str, str]]:
    """Return plural and name of the objects that belong to the release itself."""
    plurals = _plurals(cluster)
    return {(plural, one["metadata"]["name"]) for plural in plurals for one in items_of(cluster, namespace, plural)}


def generated(cluster: KubeCluster, namespace: str) -> dict[str, Object]:
    """Return the contents of the release's Secrets by name."""
    return {one["metadata"]["name"]: one["data"] for one in items_of(cluster, namespace, "secrets")}


def specs_of(cluster: KubeCluster, namespace: str) -> dict[tuple[str, str], Object]:
    """Return the specifications of Deployments and RayServices by plural and name."""
    return {
        (plural, one["metadata"]["name"]): one["spec"]
        for plural in ("deployments", "rayservices")
        for one in items_of(cluster, namespace, plural)
    }


def being_deleted(cluster: KubeCluster, namespace: str) -> list[Object]:
    plurals = _plurals(cluster)
    return [one for plural in plurals for one in items_of(cluster, namespace, plural, is_being_deleted=True)]


def items_of(cluster: KubeCluster, namespace: str, plural: str, *, is_being_deleted: bool = False) -> list[Object]:
    """Return the objects that Helm has created for the release and that are not, or are, being deleted."""
    items = cluster.rest.must("GET", _plurals(cluster)[plural].format(namespace))["items"]
    return [
        one
        for one in items
        if one["metadata"].get("annotations", {}).get("meta.helm.sh/release-name") == RELEASE
        and ("deletionTimestamp" in one["metadata"]) is is_being_deleted
    ]
