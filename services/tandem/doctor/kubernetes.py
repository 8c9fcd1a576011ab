"""Check what Kubernetes provides to this pod, and the planner's permissions at the API server, without changing an
object.

The check of permissions posts SelfSubjectAccessReview (authorization.k8s.io/v1), which every account may do.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.config import Config
from tandem.doctor.finding import Finding, fail, ok, skip
from tandem.doctor.system import System
from tandem.doctor.tls import http_connection

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
ANSWER_S = 5.0
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Hold what Kubernetes provides to this process.

    `api`: host:port of the API server, empty outside a cluster. `namespace`: namespace of this pod, empty if unknown.
    `has_token`: whether the pod has a token of its service account."""

    api: str
    namespace: str
    has_token: bool


def read_pod(system: System) -> PodFacts:
    host, port = system.environ.get("KUBERNETES_SERVICE_HOST", ""), system.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return PodFacts(
        api=f"{host}:{port}" if host else "",
        namespace=system.text(f"{ACCOUNT}/namespace") or system.environ.get("POD_NAMESPACE", ""),
        has_token=bool(system.text(f"{ACCOUNT}/token")),
    )


def judge_pod(pod: PodFacts) -> Finding:
    if not pod.api:
        return skip("pod", "KUBERNETES_SERVICE_HOST is unset: this is not a pod")
    token = "with" if pod.has_token else "without"
    return ok("pod", f"in namespace {pod.namespace or 'unknown'}, API server {pod.api}, {token} a token for it")


class Permission(NamedTuple):
    """Name a permission at the Kubernetes API server: a verb, such as get, on a resource of an API group.

    `group`: name of the API group, empty for the core API."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' * bool(self.group)}{self.group}"


Review = Callable[[Permission], bool]
"""Signature of a review: `review(permission)` asks the API server and returns whether it grants the permission. Raises
OSError where it does not answer."""


def required_permissions(config: Config) -> tuple[Permission, ...]:
    """Return the permissions that the planner needs at the API server. There are none unless `planner.actuator` is
    raycluster."""
    if config.planner.actuator != "raycluster":
        return ()
    clusters = [Permission("ray.io", "rayclusters", verb) for verb in ("get", "patch")]
    services = [Permission("ray.io", "rayservices", "get")]
    pods = [Permission("", "pods", verb) for verb in ("list", "watch")]
    leases = [Permission("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")]
    return (*clusters, *services, *pods, *leases)


def check_review(permissions: Sequence[Permission], namespace: str, review: Review) -> Finding:
    """Return a finding on whether the API server grants `permissions` in `namespace`; the finding names those that it
    denies.

    `review`: asks the API server. A request that fails is reported as a failure, not raised."""
    try:
        denied = [permission for permission in permissions if not review(permission)]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        fix = "let the NetworkPolicy admit the planner to the API server (`networkPolicy.apiServerTo`)"
        reason = str(error) or type(error).__name__
        return fail("rbac", f"the API server does not review our permissions: {reason}", fix)
    if not denied:
        return ok("rbac", f"all {len(permissions)} permissions that the planner needs in {namespace}")
    fix = (
        "install the Role of the chart (`planner.enabled` with `planner.actuator: raycluster`), or run "
        f"`kubectl -n {namespace} create role` with these verbs and a rolebinding to the pod's service account"
    )
    may_not = ", ".join(map(str, denied))
    return fail("rbac", f"the planner cannot act: its service account may not {may_not} in {namespace}", fix)


def reviewer(system: System, pod: PodFacts) -> Review:
    """Return a function that asks the API server as the pod's service account, over TLS.

    The server's certificate is verified with the cluster's CA. Raises OSError if the CA's file is missing."""
    context = ssl.create_default_context(cafile=str(system.path(f"{ACCOUNT}/ca.crt")))
    token = system.text(f"{ACCOUNT}/token")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    host, _, port = pod.api.rpartition(":")

    def review(permission: Permission) -> bool:
        question = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": pod.namespace, **permission._asdict()}},
        }
        with http_connection(host, int(port), ANSWER_S, context) as connection:
            connection.request("POST", _REVIEWS, json.dumps(question), headers)
            answer = connection.getresponse()
            if answer.status not in (200, 201):
                raise OSError(f"HTTP status {answer.status}")
            return bool(json.loads(answer.read())["status"]["allowed"])

    return review


def check_permissions(system: System, config: Config) -> Finding:
    """Return a finding on whether this pod has the permissions that the planner needs.

    The check is skipped if the planner needs none, or if there is no API server or no token. Blocks for the requests to
    the API server."""
    required, pod = required_permissions(config), read_pod(system)
    if not required:
        return skip("rbac", "planner.actuator is serve: the planner does not use the API server")
    if not pod.api:
        return skip("rbac", "KUBERNETES_SERVICE_HOST is unset: this is not a pod")
    if not pod.has_token:
        return skip(
            "rbac", "this pod has no service account token: only the planner's pod needs one, run the check there"
        )
    return check_review(required, pod.namespace, reviewer(system, pod))
