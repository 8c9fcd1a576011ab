"""Objects of the gateways: each as its values say, and not there when it is not wanted; never a request."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.core.config import Config
from tandem.core.settings import resolve
from tandem.gateway.http.monitoring_routes import PROBES
from tests.chart.release import CHART, CI, ROOT, Rendered, ci, env, gateway, render

EACH = pytest.mark.parametrize("name", CI)
OFF = ci("everything-off")
ON = ci("everything-on")


def config(name: str) -> Config:
    return resolve([("config.yaml", ci(name).config)]).config


@EACH
def test_ports_are_those_that_the_program_takes(name: str) -> None:
    (container,) = gateway(ci(name))["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    settings = config(name).gateway
    expected = {"http": settings.port, "grpc": settings.own_grpc_port, "metrics": settings.metrics_port}
    assert ports == expected and settings.host == settings.own_metrics_host == "0.0.0.0"
    assert container["args"] == ["gateway", "--config", "/etc/tandem/config.yaml"]


def test_ports_of_values_are_the_program_s_and_the_service_s() -> None:
    values = {"port": 8080, "grpc_port": 9090, "metrics_port": 9100, "service": {"httpPort": 81, "grpcPort": 82}}
    rendered = render({"gateway": values})
    (container,) = gateway(rendered)["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [8080, 9090, 9100]
    ports = rendered.one("gateway-service")["spec"]["ports"]
    assert [(port["port"], port["targetPort"]) for port in ports] == [(81, "http"), (82, "grpc")]


@EACH
def test_probes_use_paths_that_the_program_serves(name: str) -> None:
    (container,) = gateway(ci(name))["containers"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: get["path"] for kind, get in probes.items()} == {
        "startup": "/live",
        "readiness": "/ready",
        "liveness": "/live",
    }
    assert {get["path"].encode() for get in probes.values()} <= PROBES
    assert {get["port"] for get in probes.values()} == {"http"}
    assert {get["scheme"].lower() for get in probes.values()} == {config(name).gateway.scheme}


@EACH
def test_a_gateway_that_ends_has_time_for_its_streams(name: str) -> None:
    pod = gateway(ci(name))
    wait = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] >= wait + config(name).gateway.drain_s + 10
    rolling = ci(name).one("gateway-deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}


def test_a_longer_drain_is_a_longer_end() -> None:
    assert gateway(render({"gateway": {"drain_s": 600.2}}))["terminationGracePeriodSeconds"] == 601 + 5 + 15


def test_the_number_of_pods_is_the_autoscaler_s_where_there_is_one() -> None:
    assert OFF.one("gateway-deployment")["spec"]["replicas"] == 1 and not OFF.has("gateway-hpa")
    assert "replicas" not in ON.one("gateway-deployment")["spec"]
    scaler = ON.one("gateway-hpa")["spec"]
    assert scaler["scaleTargetRef"]["name"] == ON.one("gateway-deployment")["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 10)
    assert [metric["type"] for metric in scaler["metrics"]] == ["Resource", "Pods"]
    assert scaler["behavior"]["scaleDown"]["policies"][0]["value"] == 1


def test_a_disruption_takes_one_gateway_at_a_time() -> None:
    assert not OFF.has("gateway-pdb")
    assert ON.one("gateway-pdb")["spec"]["maxUnavailable"] == 1


def test_gateways_are_spread_over_zones_and_nodes() -> None:
    spread = gateway(ON)["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert {one["whenUnsatisfiable"] for one in spread} == {"DoNotSchedule"}
    labels = ON.one("gateway-deployment")["spec"]["template"]["metadata"]["labels"]
    assert all(one["labelSelector"]["matchLabels"].items() <= labels.items() for one in spread)
    assert "topologySpreadConstraints" not in gateway(OFF)


def test_placement_and_images_follow_the_values() -> None:
    pod, (container,) = gateway(ON), gateway(ON)["containers"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"} and pod["priorityClassName"] == "high"
    assert pod["tolerations"] == [{"key": "edge", "operator": "Exists"}] and "nodeAffinity" in pod["affinity"]
    assert container["image"].startswith("registry.example.org/tandem-gateway@sha256:")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert env(container)["PYTHONFAULTHANDLER"] == "1"
    template = ON.one("gateway-deployment")["spec"]["template"]["metadata"]
    assert template["labels"]["tier"] == "edge" and template["annotations"]["example.org/note"] == "gateway"
    assert gateway(OFF)["containers"][0]["image"] == "tandem-gateway:0.1.0"
    assert {"nodeSelector", "tolerations", "affinity", "imagePullSecrets"}.isdisjoint(gateway(OFF))


def test_the_service_has_both_protocols() -> None:
    service = ON.one("gateway-service")
    assert service["spec"]["type"] == "LoadBalancer" and service["metadata"]["annotations"]
    assert protocols(ON) == {"http": "https", "grpc": "https"}, "its gateways have a certificate"
    assert protocols(OFF) == {"http": "http", "grpc": "kubernetes.io/h2c"}
    assert "annotations" not in OFF.one("gateway-service")["metadata"]


def protocols(rendered: Rendered) -> dict[str, str]:
    return {port["name"]: port["appProtocol"] for port in rendered.one("gateway-service")["spec"]["ports"]}


@pytest.mark.parametrize(("template", "port"), [("gateway-ingress", "http"), ("gateway-grpc-ingress", "grpc")])
def test_an_ingress_leads_to_the_service(template: str, port: str) -> None:
    assert not OFF.has(template)
    made = ON.one(template)
    (rule,) = made["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = ON.one("gateway-service")
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": port}}
    assert port in {one["name"] for one in service["spec"]["ports"]}
    assert made["spec"]["ingressClassName"] == "nginx" and made["metadata"]["annotations"]
    assert made["spec"]["tls"][0]["hosts"] == [rule["host"]]


def test_an_ingress_without_a_host_takes_every_name() -> None:
    (rule,) = render({"gateway": {"ingress": {"enabled": True}}}).one("gateway-ingress")["spec"]["rules"]
    assert "host" not in rule


@pytest.mark.parametrize(
    ("template", "kind", "port"), [("gateway-httproute", "HTTPRoute", 443), ("gateway-grpcroute", "GRPCRoute", 8443)]
)
def test_a_route_leads_to_the_service(template: str, kind: str, port: int) -> None:
    assert not OFF.has(template)
    route = ON.one(template)
    assert (route["apiVersion"], route["kind"]) == ("gateway.networking.k8s.io/v1", kind)
    assert route["spec"]["parentRefs"] == [{"name": "edge", "namespace": "edge"}] and route["spec"]["hostnames"]
    (rule,) = route["spec"]["rules"]
    service = ON.one("gateway-service")
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": port}]
    assert port in {one["port"] for one in service["spec"]["ports"]}
    if kind == "HTTPRoute":
        assert rule["timeouts"] == {"request": "0s"}, "an answer is a stream of any length"


def test_traces_go_to_the_endpoint_of_the_values() -> None:
    def environment(values: dict[str, Any]) -> dict[str, Any]:
        found = env(gateway(render({"otel": values}))["containers"][0])
        return {name: value for name, value in found.items() if name.startswith("OTEL_")}

    assert environment({}) == {}
    there = environment({"endpoint": "https://collector.example.org:4317", "samplerArg": "0.5"})
    assert there["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector.example.org:4317"
    assert (there["OTEL_TRACES_EXPORTER"], there["OTEL_METRICS_EXPORTER"]) == ("otlp", "none")
    assert there["OTEL_TRACES_SAMPLER_ARG"] == "0.5"
    assert (
        environment({"collector": {"enabled": True}})["OTEL_EXPORTER_OTLP_ENDPOINT"]
        == "http://rel-tandem-collector:4317"
    )
    other = environment({"collector": {"enabled": True}, "protocol": "http/protobuf", "sampler": "always_on"})
    assert other["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(":4318") and "OTEL_TRACES_SAMPLER_ARG" not in other


@EACH
def test_variables_are_ones_that_the_program_takes(name: str) -> None:
    from tandem.core.settings import from_environment
    from tandem.obs.otel_settings import read_otel

    variables = {key: value for key, value in env(gateway(ci(name))["containers"][0]).items() if isinstance(value, str)}
    resolve([("environment", from_environment(variables))])
    read_otel(variables)
    names = [one["name"] for one in gateway(ci(name))["containers"][0]["env"]]
    assert len(set(names)) == len(names)
    for position, one in enumerate(gateway(ci(name))["containers"][0]["env"]):
        for used in re.findall(r"\$\((\w+)\)", one.get("value", "")):
            assert used in names[:position], "a variable can use only those before it"


def test_a_rollout_may_take_as_long_as_the_documents_advise() -> None:
    """docs/kubernetes.md and NOTES.txt wait half an hour; the default `progressDeadlineSeconds` is ten minutes."""
    deadline = ci("cpu-trial").one("gateway-deployment")["spec"]["progressDeadlineSeconds"]
    waits = re.findall(r"rollout status .*--timeout=(\d+)m", (ROOT / "docs" / "kubernetes.md").read_text())
    waits += re.findall(r"rollout status .*--timeout=(\d+)m", (CHART / "templates" / "NOTES.txt").read_text())
    assert len(waits) >= 2 and all(deadline >= int(minutes) * 60 for minutes in waits)
    patient = render({"gateway": {"progressDeadlineSeconds": 7200}})
    assert patient.one("gateway-deployment")["spec"]["progressDeadlineSeconds"] == 7200
    assert "progressDeadlineSeconds" not in patient.config["gateway"]
