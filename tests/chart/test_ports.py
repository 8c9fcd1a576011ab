"""Test that the ports of the chart's pods, the Services that lead to them and the peers that NetworkPolicies admit are
those of SECURITY.md."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.chart.release import Object, Rendered, pods, render
from tests.security_tables import names, security_table

LISTS = ("gatewayFrom", "metricsFrom", "operatorFrom")
VALUES: dict[str, Any] = {
    "planner": {"enabled": True},
    "otel": {"collector": {"enabled": True}},
    "networkPolicy": {name: [{"podSelector": {"matchLabels": {"list": name}}}] for name in LISTS},
}
COMPONENT = "app.kubernetes.io/component"


class Port(NamedTuple):
    """A port of a pod. `services`: the components of the Services that lead to it. `peers`: who may connect."""

    pod: str
    name: str
    services: frozenset[str]
    peers: frozenset[str]


def peers(rendered: Rendered, labels: dict[str, str], port: Object) -> frozenset[str]:
    """Return the components and lists of values that NetworkPolicies admit to a port of the pods with these labels. A
    pod without a policy would be reached by everybody."""
    policies = [one["spec"] for one in rendered.kinds("NetworkPolicy")]
    own = [policy for policy in policies if policy["podSelector"]["matchLabels"].items() <= labels.items()]
    assert own, "everybody"
    found = set()
    for rule in (rule for policy in own for rule in policy["ingress"]):
        if "ports" in rule and not {port["name"], port["containerPort"]} & {each["port"] for each in rule["ports"]}:
            continue
        for peer in rule["from"]:
            labels = peer["podSelector"]["matchLabels"]
            found.add(labels.get("list") or labels[COMPONENT])
    return frozenset(found)


def rendered_ports() -> set[Port]:
    rendered = render(VALUES)
    found = set()
    for where, pod in pods(rendered.objects):
        labels = pod["metadata"]["labels"]
        name = labels[COMPONENT]
        if name == "test":
            continue
        if name == "ray":
            kind = "head" if where.endswith("/head") else "worker"
            labels, name = labels | {"ray.io/node-type": kind}, f"ray-{kind}"  # KubeRay adds the label
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                services = {
                    one["metadata"]["labels"][COMPONENT]
                    for one in rendered.kinds("Service")
                    if one["spec"]["selector"].items() <= labels.items()
                    and any(each["targetPort"] == port["name"] for each in one["spec"]["ports"])
                }
                found.add(Port(name, port["name"], frozenset(services), peers(rendered, labels, port)))
    return found


def test_ports_are_those_of_the_document() -> None:
    documented = {
        Port(pod, port.strip("`"), frozenset(names(service)), frozenset(names(reached)))
        for pod, port, service, reached, _ in security_table("Ports of the chart")
    }
    assert rendered_ports() == documented


def test_everybody_is_a_client_only_at_the_ports_of_the_api() -> None:
    """Where `gatewayFrom` is empty, which is the default."""
    open_to_all = [
        (one["metadata"]["name"], port["port"])
        for one in render().kinds("NetworkPolicy")
        for rule in one["spec"]["ingress"]
        if not rule.get("from")
        for port in rule.get("ports", [{"port": "all"}])
    ]
    assert open_to_all == [("rel-tandem-gateway", "http"), ("rel-tandem-gateway", "grpc")]
