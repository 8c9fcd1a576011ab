"""What Kubernetes gives a pod of Tandem: its service account and its namespace; never asks the API server."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.doctor.finding import Finding, ok, skip
from tandem.doctor.system import System

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class PodFacts:
    """`api` is host:port of the API server, empty outside a cluster."""

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
        return skip("pod", "KUBERNETES_SERVICE_HOST is unset: this is no pod")
    token = "a" if pod.has_token else "no"
    return ok("pod", f"in namespace {pod.namespace or 'unknown'}, API server {pod.api}, {token} token to ask it")
