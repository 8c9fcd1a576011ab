"""Check what Kubernetes provides to this pod: service account token and namespace, without a call to the API server."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.doctor.finding import Finding, ok, skip
from tandem.doctor.system import System

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Kubernetes environment of this process. `api`: host:port of the API server, empty outside a cluster."""

    api: str
    namespace: str
    has_token: bool


def read_pod(system: System) -> PodFacts:
    host, port = system.environ.get("KUBERNETES_SERVICE_HOST", ""), system.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return PodFacts(
        api=f"{host}:{port}" if host else "",
        namespace=system.text(f"{ACCOUNT}/namespace"),
        has_token=bool(system.text(f"{ACCOUNT}/token")),
    )


def judge_pod(pod: PodFacts) -> Finding:
    if not pod.api:
        return skip("pod", "KUBERNETES_SERVICE_HOST is unset: this is not a pod")
    token = "with" if pod.has_token else "without"
    return ok("pod", f"in namespace {pod.namespace or 'unknown'}, API server {pod.api}, {token} a token for it")
