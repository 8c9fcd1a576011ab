"""Check the planner's permissions at Kubernetes' API server, without changing an object.

The check posts SelfSubjectAccessReview (authorization.k8s.io/v1), which every account may do.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.core.config import Config
from tandem.doctor.finding import Finding, fail, ok, skip
from tandem.doctor.pod import ACCOUNT, PodFacts, read_pod
from tandem.doctor.system import System

ANSWER_S = 5.0
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Permission(NamedTuple):
    """Verb on a resource of an API group; the group is empty for the core API."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' * bool(self.group)}{self.group}"


@dataclass(frozen=True, slots=True)
class Reviewed:
    """Result of a review. `problem`: why the API server did not answer it, else empty."""

    denied: tuple[Permission, ...] = ()
    num_reviewed: int = 0
    problem: str = ""


Post = Callable[[str, Any], tuple[int, Any]]
"""(path, JSON body) -> (HTTP status, JSON response). Raises OSError."""


def required_permissions(config: Config) -> tuple[Permission, ...]:
    """Return the permissions that the planner needs: none, unless it patches the RayCluster itself."""
    if config.planner.actuator != "raycluster":
        return ()
    clusters = [Permission("ray.io", "rayclusters", verb) for verb in ("get", "patch")]
    services = [Permission("ray.io", "rayservices", "get")]
    pods = [Permission("", "pods", verb) for verb in ("list", "watch")]
    leases = [Permission("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")]
    return (*clusters, *services, *pods, *leases)


def review(permissions: Sequence[Permission], namespace: str, post: Post) -> Reviewed:
    denied = []
    for permission in permissions:
        try:
            status, answer = post(_REVIEWS, _question(permission, namespace))
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Reviewed(problem=str(error) or type(error).__name__)
        if status not in (200, 201) or not isinstance(answer, dict):
            return Reviewed(problem=f"HTTP status {status}")
        if not answer.get("status", {}).get("allowed"):
            denied.append(permission)
    return Reviewed(tuple(denied), len(permissions))


def poster(system: System, pod: PodFacts) -> Post:
    """Return a function that posts as the pod's service account, over TLS verified with the cluster's CA."""
    context = ssl.create_default_context(cafile=str(system.path(f"{ACCOUNT}/ca.crt")))
    token = system.text(f"{ACCOUNT}/token")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    host, _, port = pod.api.rpartition(":")

    def post(path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPSConnection(host, int(port), timeout=ANSWER_S, context=context)
        with closing(connection):
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    return post


def judge_review(reviewed: Reviewed, namespace: str) -> Finding:
    if reviewed.problem:
        fix = "the NetworkPolicy must let the planner reach the API server"
        return fail("rbac", f"the API server does not review our permissions: {reviewed.problem}", fix)
    if not reviewed.denied:
        return ok("rbac", f"all {reviewed.num_reviewed} permissions that the planner needs in {namespace}")
    denied = ", ".join(map(str, reviewed.denied))
    fix = (
        "the Role of the chart (`planner.enabled` with `planner.actuator: raycluster`), or "
        f"`kubectl -n {namespace} create role` with these verbs and a rolebinding to the pod's service account"
    )
    return fail("rbac", f"the service account may not {denied} in {namespace}", fix)


def examine_permissions(system: System, config: Config) -> Finding:
    """Review the permissions that the planner needs; skipped where it needs none or there is no API server."""
    required, pod = required_permissions(config), read_pod(system)
    if not required:
        return skip("rbac", "planner.actuator is serve: the planner does not use the API server")
    if not pod.api:
        return skip("rbac", "KUBERNETES_SERVICE_HOST is unset: this is not a pod")
    if not pod.has_token:
        return skip(
            "rbac", "this pod has no service account token: only the planner's pod needs one, run the check there"
        )
    return judge_review(review(required, pod.namespace, poster(system, pod)), pod.namespace)


def _question(permission: Permission, namespace: str) -> dict[str, Any]:
    group, resource, verb = permission
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"namespace": namespace, "group": group, "resource": resource, "verb": verb}},
    }
