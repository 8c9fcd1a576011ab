"""Test the check of the planner's permissions with an API server over TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tandem.core.config import Config, PlannerConfig
from tandem.doctor.kubernetes import (
    ACCOUNT,
    Permission,
    check_permissions,
    check_review,
    required_permissions,
)
from tests.certificates import Authority
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips
from tests.unit.http_server import QuietHandler, serving

ROLE = Path(__file__).resolve().parents[3] / "helm/tandem/templates/planner-role.yaml"
PATCHES = Config(planner=PlannerConfig(actuator="raycluster"))
PATCH = Permission("ray.io", "rayclusters", "patch")
LEASE = Permission("coordination.k8s.io", "leases", "create")
REVIEW = (
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    "authorization.k8s.io/v1",
)
ALLOWED = (201, {"status": {"allowed": True}})
Reply = tuple[int, Any]
Seen = tuple[str, str, Permission]


def allowing(*denied: Permission) -> Callable[[Permission], bool]:
    """Return the review of an API server that denies only these permissions."""
    return lambda permission: permission not in denied


def test_only_a_patching_planner_needs_permissions() -> None:
    assert required_permissions(Config()) == ()
    required = required_permissions(PATCHES)
    assert {PATCH, LEASE} <= set(required) and len(set(required)) == len(required)


def test_the_chart_s_role_allows_exactly_the_required_permissions() -> None:
    """Compare with the role in the chart, without the lines of the template language."""
    lines = [line for line in ROLE.read_text().splitlines() if "{{" not in line]
    rules = yaml.safe_load("\n".join(lines))["rules"]
    allowed = {
        Permission(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == set(required_permissions(PATCHES))


def test_all_allowed() -> None:
    assert_fine(
        check_review(required_permissions(PATCHES), "serving", allowing()),
        "rbac",
        "all 8 permissions that the planner needs in serving",
    )


def test_denied_permissions_are_named() -> None:
    reviewed = check_review(required_permissions(PATCHES), "serving", allowing(PATCH, LEASE))
    reason = "its service account may not patch rayclusters.ray.io, create leases.coordination.k8s.io in serving"
    assert_fails(reviewed, "rbac", reason, "`kubectl -n serving create role`")


def test_a_server_that_does_not_review() -> None:
    def refused(permission: Permission) -> bool:
        raise ConnectionRefusedError("connection refused")

    finding = check_review([PATCH], "serving", refused)
    assert_fails(finding, "rbac", "does not review our permissions: connection refused", "the NetworkPolicy")


def test_without_an_api_server_or_token_the_check_is_skipped(tmp_path: Path) -> None:
    assert_skips(check_permissions(system(tmp_path, {}), Config()), "rbac", "planner.actuator is serve")
    assert_skips(check_permissions(system(tmp_path, {}), PATCHES), "rbac", "this is not a pod")
    bare = system(tmp_path, {}, KUBERNETES_SERVICE_HOST="127.0.0.1")
    assert_skips(check_permissions(bare, PATCHES), "rbac", "no service account token: only the planner's")


def test_reviews_are_posted_over_tls_as_the_service_account(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    replies = [*[ALLOWED] * 8, (403, {}), (201, []), (201, {"status": {}})]
    with _api_server(authority, replies) as (port, seen):
        files = {
            f"{ACCOUNT}/token": "sesame",
            f"{ACCOUNT}/namespace": "serving",
            f"{ACCOUNT}/ca.crt": authority.ca.read_text(),
        }
        place = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": str(port)}
        here = system(tmp_path / "a", files, **place)
        assert_fine(check_permissions(here, PATCHES), "rbac", "all 8")
        assert seen == [("Bearer sesame", "serving", each) for each in required_permissions(PATCHES)]
        for reason in ("HTTP status 403", "list indices", "'allowed'"):
            finding = check_permissions(here, PATCHES)
            assert_fails(finding, "rbac", f"does not review our permissions: {reason}", "the NetworkPolicy")
        files[f"{ACCOUNT}/ca.crt"] = Authority(tmp_path / "other").ca.read_text()
        finding = check_permissions(system(tmp_path / "b", files, **place), PATCHES)
        assert_fails(finding, "rbac", "CERTIFICATE_VERIFY_FAILED", "the NetworkPolicy")
        assert len(seen) == 11, "an unknown server gets no token"


@contextmanager
def _api_server(authority: Authority, replies: list[Reply]) -> Iterator[tuple[int, list[Seen]]]:
    """Run an API server that gives these replies; yields its port, and the credentials, the namespace and the
    permission of each review that it received."""
    seen: list[Seen] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            attributes = body["spec"]["resourceAttributes"]
            seen.append((self.headers["Authorization"], attributes.pop("namespace"), Permission(**attributes)))
            is_review = (self.path, body["kind"], body["apiVersion"]) == REVIEW
            status, reply = replies.pop(0) if is_review else (404, {})
            self.answer(status, json.dumps(reply).encode())

    cluster = authority.issue("api", dns="localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.tls_cert_file, cluster.tls_key_file)
    with serving(Handler, context) as server:
        server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # refused handshakes
        yield server.server_port, seen
