"""What Kubernetes gives a pod of Tandem: its service account and its addresses; never asks the API server."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import Config
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.doctor.system import System

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_IP_NAMES = ("POD_IP", "RAY_NODE_IP", "HOST_IP")
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Pod:
    """`api` is host:port of the API server, empty outside a cluster. `addresses`: variables of the downward API that are
    set, of those that workers can be announced by."""

    api: str
    namespace: str
    has_token: bool
    addresses: tuple[str, ...]


def read_pod(system: System) -> Pod:
    host, port = system.environ.get("KUBERNETES_SERVICE_HOST", ""), system.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Pod(
        api=f"{host}:{port}" if host else "",
        namespace=system.text(f"{ACCOUNT}/namespace"),
        has_token=bool(system.text(f"{ACCOUNT}/token")),
        addresses=tuple(name for name in _IP_NAMES if system.environ.get(name)),
    )


def judge_pod(pod: Pod, config: Config, *, asks_server: bool) -> tuple[Finding, ...]:
    """`asks_server`: something that runs with these settings asks the API server."""
    if not pod.api:
        return (skip("pod", "KUBERNETES_SERVICE_HOST is unset: this is no pod"),)
    found = [ok("pod", f"in namespace {pod.namespace or 'unknown'}, API server {pod.api}")]
    if not pod.has_token and asks_server:
        fix = "`serviceAccount.automount: true` for the pod that runs the planner"
        found.append(fail("pod", "there is no token of a service account, and the planner asks the API server", fix))
    if not pod.addresses and config.worker.host in _WILDCARDS and not config.worker.announce:
        fix = "POD_IP by the downward API (fieldRef: status.podIP), or worker.announce"
        found.append(warn("pod", "worker.host is every address, and nothing tells the pod's own", fix))
    return tuple(found)
