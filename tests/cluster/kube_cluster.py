"""Reach the Kubernetes cluster of TANDEM_KUBECONFIG: raw requests, Helm, and namespaces that the tests own.

Tests create objects only in namespaces whose name begins with `PREFIX`, and delete these namespaces at the end.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
import yaml
from kubernetes import client, config

from tests.chart.release import CHART, RELEASE, Object, helm_program

KUBECONFIG = os.environ.get("TANDEM_KUBECONFIG", "")
PREFIX = "tandem-tests"
PATIENCE_S = 420.0
"""Longest wait for what the cluster does by itself: KubeRay tries for five minutes to remove Ray's state from Redis."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_BY_THE_CLUSTER = {
    ("configmaps", "kube-root-ca.crt"),
    ("serviceaccounts", "default"),
}
"""What Kubernetes creates in each namespace."""
_NOT_KEPT = {"events", "events.events.k8s.io"}
"""Kinds that only record what happened, and expire."""


class Reply(NamedTuple):
    status: int
    body: Any

    @property
    def message(self) -> str:
        return str(self.body.get("message", self.body)) if isinstance(self.body, dict) else str(self.body)


class Kind(NamedTuple):
    """A kind of objects, as the API server lists it. `prefix`: path of its group and version."""

    prefix: str
    plural: str
    group: str
    is_namespaced: bool
    verbs: frozenset[str]

    def path(self, namespace: str, name: str = "") -> str:
        place = f"/namespaces/{namespace}" if self.is_namespaced else ""
        return f"{self.prefix}{place}/{self.plural}{f'/{name}' if name else ''}"


class Rest:
    """Send requests to an API server with the credentials of `settings`; errors are replies too."""

    def __init__(self, settings: client.Configuration) -> None:
        self._settings = settings
        self._pool = client.ApiClient(settings).rest_client.pool_manager

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        **query: Any,
    ) -> Reply:
        token = self._settings.get_api_key_with_prefix("BearerToken")
        response = self._pool.request(
            method,
            f"{self._settings.host}{path}?{urlencode(query)}",
            body=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type, **({"Authorization": token} if token else {}), **(headers or {})},
            timeout=timeout_s,
            retries=False,
        )
        try:
            return Reply(response.status, json.loads(response.data))
        except ValueError:
            return Reply(response.status, response.data.decode(errors="replace"))

    def must(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Send a request that has to succeed; return the body of the reply."""
        reply = self(method, path, body, **options)
        assert reply.status < 300, f"{method} {path}: {reply.status} {reply.message}"
        return reply.body


class KubeCluster:
    """The cluster of TANDEM_KUBECONFIG, with the rights of its administrator."""

    def __init__(self) -> None:
        self.settings = client.Configuration()
        config.load_kube_config(KUBECONFIG, client_configuration=self.settings)  # type: ignore[no-untyped-call]
        self.rest = Rest(self.settings)
        self.version = str(self.rest.must("GET", "/version")["gitVersion"])
        taken = [name for name in self._namespaces() if name.startswith(PREFIX)]
        if taken:
            pytest.exit(
                f"the cluster has namespaces {', '.join(taken)} already: delete them if no other run uses them", 1
            )
        self._kept = ExitStack()

    def close(self) -> None:
        self._kept.close()

    def _namespaces(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.rest.must("GET", "/api/v1/namespaces")["items"]]

    # ---- kinds and objects

    @functools.cached_property
    def kinds(self) -> dict[tuple[str, str], Kind]:
        """Return all kinds that the server has, by `apiVersion` and `kind`."""
        versions = ["v1"]
        for group in self.rest.must("GET", "/apis")["groups"]:
            versions += [one["groupVersion"] for one in group["versions"]]
        found: dict[tuple[str, str], Kind] = {}
        for version in versions:
            prefix = "/api/v1" if version == "v1" else f"/apis/{version}"
            listed = self.rest("GET", prefix)
            # The server of an aggregated API may be away.
            for one in listed.body["resources"] if listed.status == 200 else ():
                if "/" not in one["name"]:
                    group_name = version.rpartition("/")[0]
                    kind = Kind(prefix, one["name"], group_name, one["namespaced"], frozenset(one["verbs"]))
                    found[version, one["kind"]] = kind
        return found

    def kind(self, content: Object) -> Kind:
        return self.kinds[content["apiVersion"], content["kind"]]

    def require_kinds(self, objects: Iterable[Object]) -> None:
        """Skip the test if the cluster lacks the CRD of one of `objects`."""
        missing = {f"{one['kind']} ({one['apiVersion']})" for one in objects} - {
            f"{kind} ({version})" for version, kind in self.kinds
        }
        if missing:
            pytest.skip(f"the cluster does not have {', '.join(sorted(missing))}")

    def contents(self, namespace: str) -> set[tuple[str, str]]:
        """Return kind and name of each object in a namespace, but not what Kubernetes puts into each."""
        found = set[tuple[str, str]]()
        for kind in set(self.kinds.values()):
            name = f"{kind.plural}.{kind.group}".rstrip(".")
            if kind.is_namespaced and "list" in kind.verbs and name not in _NOT_KEPT:
                reply = self.rest("GET", kind.path(namespace))
                items = reply.body["items"] if reply.status == 200 else ()
                found |= {(name, str(item["metadata"]["name"])) for item in items}
        return found - _BY_THE_CLUSTER

    def wait_for_contents(self, namespace: str, expected: set[tuple[str, str]]) -> None:
        """Wait until a namespace has the objects `expected`, which garbage collection may take a while to reach."""
        until = time.monotonic() + PATIENCE_S
        while (found := self.contents(namespace)) != expected:
            assert time.monotonic() < until, f"too many: {found - expected}; missing: {expected - found}"
            time.sleep(1)

    def must_apply(self, namespace: str, content: Object) -> None:
        reply = self.apply(namespace, content)
        assert reply.status < 300, f"{content['kind']} {content['metadata']['name']}: {reply.message}"

    def apply(self, namespace: str, content: Object, **query: Any) -> Reply:
        """Apply an object on the server, strictly: unknown and repeated fields are errors. Subjects of a binding are
        put into the namespace too."""
        made = {**content, "metadata": {**content["metadata"], "namespace": namespace}}
        if "subjects" in content:
            made["subjects"] = [{**one, "namespace": namespace} for one in content["subjects"]]
        return self.rest(
            "PATCH",
            self.kind(content).path(namespace, content["metadata"]["name"]),
            made,
            content_type="application/apply-patch+yaml",
            fieldManager="tandem-tests",
            fieldValidation="Strict",
            force="true",
            **query,
        )

    # ---- namespaces

    @contextmanager
    def namespace(self, suffix: str, labels: Mapping[str, str] | None = None) -> Iterator[str]:
        """Create a namespace; delete it with all that is in it."""
        name = f"{PREFIX}-{suffix}"
        metadata = {"name": name, "labels": dict(labels or {})}
        self.rest.must("POST", "/api/v1/namespaces", {"metadata": metadata})
        path = f"/api/v1/namespaces/{name}"
        try:
            accounts = f"{path}/serviceaccounts/default"
            wait_for(lambda: self.rest("GET", accounts).status == 200, f"{name} has no default service account")
            yield name
        finally:
            self.rest("DELETE", path)
            wait_for(lambda: self.rest("GET", path).status == 404, f"{name} is not deleted")

    def enter_namespace(self, suffix: str) -> str:
        """Create a namespace that is deleted with `close`."""
        return self._kept.enter_context(self.namespace(suffix))

    # ---- Helm

    def helm(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """Run a Helm command that has to succeed; return its output."""
        command = [helm_program(), *arguments, "--kubeconfig", KUBECONFIG]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout

    def install(self, namespace: str, values: Path, *options: str, release: str = RELEASE) -> None:
        self.helm("install", release, str(CHART), "-n", namespace, "-f", str(values), *options)

    def upgrade(self, namespace: str, values: Path, *options: str, release: str = RELEASE) -> None:
        self.helm("upgrade", release, str(CHART), "-n", namespace, "-f", str(values), *options)

    def uninstall(self, namespace: str, release: str = RELEASE, *, with_hook: bool = False) -> None:
        """Uninstall a release. Its hook runs in a pod, which needs a node and an image that the node has."""
        self.helm("uninstall", release, "-n", namespace, *(() if with_hook else ("--no-hooks",)))

    # ---- accounts

    def account(self, namespace: str, name: str) -> client.Configuration:
        """Return settings with a token of a service account, which TokenRequest issues."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        token = self.rest.must("POST", path, request)["status"]["token"]
        settings = client.Configuration(host=self.settings.host, api_key={"BearerToken": f"Bearer {token}"})
        settings.ssl_ca_cert, settings.verify_ssl = self.settings.ssl_ca_cert, self.settings.verify_ssl
        return settings

    # ---- what runs there

    @functools.cached_property
    def has_ready_node(self) -> bool:
        conditions = [
            condition
            for node in self.rest.must("GET", "/api/v1/nodes")["items"]
            for condition in node["status"].get("conditions", ())
        ]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    @functools.cached_property
    def has_kuberay(self) -> bool:
        """Return whether a Deployment of KubeRay's operator has an available pod."""
        selector = "app.kubernetes.io/name=kuberay-operator"
        found = self.rest.must("GET", "/apis/apps/v1/deployments", labelSelector=selector)["items"]
        return any(one["status"].get("availableReplicas") for one in found)


def write_kubeconfig(settings: client.Configuration, path: Path) -> Path:
    """Write a kubeconfig for a program that uses a service account's token."""
    token = settings.api_key["BearerToken"].removeprefix("Bearer ")
    cluster = {"server": settings.host, "insecure-skip-tls-verify": not settings.verify_ssl}
    if settings.ssl_ca_cert:
        cluster["certificate-authority"] = settings.ssl_ca_cert
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "account"}}],
        "users": [{"name": "account", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def wait_for(condition: Callable[[], bool], problem: str, patience_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, problem
        time.sleep(0.2)
