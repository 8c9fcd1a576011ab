"""What the planner may do, as an API server over TLS says it."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tandem.core.config import Config, PlannerConfig
from tandem.doctor.pod import ACCOUNT
from tandem.doctor.rbac import (
    Permission,
    Reviewed,
    examine_permissions,
    judge_review,
    review,
    wanted_permissions,
)
from tests.certificates import Authority
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips

ROLE = Path(__file__).resolve().parents[3] / "helm/tandem/templates/planner-role.yaml"
PATCHES = Config(planner=PlannerConfig(actuator="raycluster"))
PATCH = Permission("ray.io", "rayclusters", "patch")
LEASE = Permission("coordination.k8s.io", "leases", "create")


def allowing(*denied: Permission) -> Callable[[str, Any], tuple[int, Any]]:
    """An API server that keeps only these from us."""

    def post(path: str, body: Any) -> tuple[int, Any]:
        assert path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        assert (body["kind"], body["apiVersion"]) == ("SelfSubjectAccessReview", "authorization.k8s.io/v1")
        asked = body["spec"]["resourceAttributes"]
        assert asked["namespace"] == "serving"
        found = Permission(asked["group"], asked["resource"], asked["verb"])
        return 201, {"status": {"allowed": found not in denied}}

    return post


def test_only_who_patches_asks() -> None:
    assert wanted_permissions(Config()) == ()
    wanted = wanted_permissions(PATCHES)
    assert {PATCH, LEASE} <= set(wanted) and len(set(wanted)) == len(wanted)


def test_what_the_chart_s_role_allows_is_what_is_asked_for() -> None:
    """Its lines but those of the template."""
    lines = [line for line in ROLE.read_text().splitlines() if "{{" not in line]
    rules = yaml.safe_load("\n".join(lines))["rules"]
    allowed = {
        Permission(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == set(wanted_permissions(PATCHES))


def test_all_allowed() -> None:
    reviewed = review(wanted_permissions(PATCHES), "serving", allowing())
    assert_fine(judge_review(reviewed, "serving"), "rbac", "all 8 permissions that the planner needs in serving")


def test_what_is_denied_is_named() -> None:
    reviewed = review(wanted_permissions(PATCHES), "serving", allowing(PATCH, LEASE))
    assert reviewed == Reviewed((PATCH, LEASE), 8)
    told = "we may not patch rayclusters.ray.io, create leases.coordination.k8s.io in serving"
    assert_fails(judge_review(reviewed, "serving"), "rbac", told, "`kubectl -n serving create role`")


def test_a_server_that_does_not_say() -> None:
    def refused(path: str, body: Any) -> tuple[int, Any]:
        raise ConnectionRefusedError("connection refused")

    for post, told in ((refused, "connection refused"), (lambda path, body: (403, {}), "it answers 403")):
        finding = judge_review(review([PATCH], "serving", post), "serving")
        assert_fails(finding, "rbac", f"does not say what we may do: {told}", "the NetworkPolicy")


def test_where_there_is_nobody_to_ask(tmp_path: Path) -> None:
    assert_skips(examine_permissions(system(tmp_path, {}), Config()), "rbac", "planner.actuator is serve")
    assert_skips(examine_permissions(system(tmp_path, {}), PATCHES), "rbac", "this is no pod")
    bare = system(tmp_path, {}, KUBERNETES_SERVICE_HOST="127.0.0.1")
    assert_skips(examine_permissions(bare, PATCHES), "rbac", "no token of a service account: only the planner's")


def test_it_is_asked_over_tls_as_the_service_account(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    with _api_server(authority) as (port, seen):
        files = {
            f"{ACCOUNT}/token": "sesame",
            f"{ACCOUNT}/namespace": "serving",
            f"{ACCOUNT}/ca.crt": authority.ca.read_text(),
        }
        place = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": str(port)}
        assert_fine(examine_permissions(system(tmp_path / "a", files, **place), PATCHES), "rbac", "all 8")
        assert seen == ["Bearer sesame"] * 8
        files[f"{ACCOUNT}/ca.crt"] = Authority(tmp_path / "other").ca.read_text()
        finding = examine_permissions(system(tmp_path / "b", files, **place), PATCHES)
        assert_fails(finding, "rbac", "CERTIFICATE_VERIFY_FAILED", "the NetworkPolicy")
        assert len(seen) == 8, "who is not known is told no token"


@contextmanager
def _api_server(authority: Authority) -> Iterator[tuple[int, list[str]]]:
    """That allows everything; its port and the credentials that it was shown."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(self.headers["Authorization"])
            self._answer({"status": {"allowed": bool(body["spec"]["resourceAttributes"]["verb"])}})

        def _answer(self, said: Any) -> None:
            text = json.dumps(said).encode()
            self.send_response(201)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            return

    cluster = authority.issue("api", dns="localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.tls_cert_file, cluster.tls_key_file)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # refused handshakes
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, seen
        finally:
            server.shutdown()
            thread.join()
