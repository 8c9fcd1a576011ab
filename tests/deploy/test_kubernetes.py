"""Test the samples of deploy/kubernetes: valid objects of Kubernetes, and what they name exists in the chart, in the
gateway and among the metrics. No cluster takes them here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from tandem.core.lane import Lane
from tandem.gateway.http.monitoring_routes import MetricsRoutes
from tandem.gateway.telemetry import endpoint_metrics
from tests.chart.release import Object, Rendered, gateway, pods, render
from tests.deploy.files import DEPLOY, ROOT, known_series
from tests.deploy.guide import commands
from tests.deploy.promql import names_in

FOLDER = DEPLOY / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
OUTSIDE = {
    "cert-manager.io",
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "llm-d.ai",
    "keda.sh",
}
"""API groups without schemas here."""


def objects(name: str, kind: str = "") -> list[Object]:
    found = yaml.load_all((FOLDER / name).read_text(), yaml.CSafeLoader)
    return [each for each in found if kind in ("", each["kind"])]


def one(file: str, kind: str, name: str = "") -> Object:
    """Return the object of a kind in a file; `name` tells it from others of the kind."""
    (found,) = [each for each in objects(file, kind) if name in ("", each["metadata"]["name"])]
    return found


@pytest.fixture(scope="module")
def chart() -> Rendered:
    """Render the release that the samples belong to."""
    return render(release="tandem")


@pytest.mark.parametrize("name", FILES)
def test_objects_are_those_of_kubernetes(name: str) -> None:
    newest = max(kubernetes.all_versions(), key=lambda version: tuple(map(int, version.split("."))))
    for each in objects(name):
        assert each["metadata"]["name"] and each["metadata"]["namespace"]
        if each["apiVersion"].partition("/")[0] not in OUTSIDE:
            kubernetes.validate(each, newest, strict=True)


def test_each_sample_is_listed() -> None:
    assert all(f"kubernetes/{name}" in (DEPLOY / "README.md").read_text() for name in FILES)


def test_the_certificate_is_for_the_gateways_service() -> None:
    *_, certificate = objects("gateway-certificate.yaml", "Certificate")
    secret = certificate["spec"]["secretName"]
    chart = render({"gateway": {"tls": {"existingSecret": secret}}}, release="tandem")
    service = chart.one("gateway-service")["metadata"]["name"]
    assert f"{service}.{certificate['metadata']['namespace']}.svc" in certificate["spec"]["dnsNames"]
    projected = [
        source for volume in gateway(chart)["volumes"] for source in volume.get("projected", {}).get("sources", ())
    ]
    assert secret in [source["secret"]["name"] for source in projected if "secret" in source]


def test_the_certificate_is_the_one_that_the_chart_expects() -> None:
    file = "gateway-certificate.yaml"
    certificate = one(file, "Certificate", "tandem-gateway")["spec"]
    assert certificate["secretName"] == "tandem-gateway-tls", "docs/kubernetes.md names it"
    values: dict[str, Any] = {"gateway": {"tls": {"existingSecret": certificate["secretName"]}}}
    chart = render({**values, "monitoring": {"serviceMonitor": {"enabled": True}}}, release="tandem")
    service = chart.one("gateway-service")["metadata"]["name"]
    (endpoint,) = chart.one("gateway-servicemonitor")["spec"]["endpoints"]
    host = endpoint["tlsConfig"]["serverName"].replace(".inference.", ".tandem.")
    assert {host, service} <= set(certificate["dnsNames"])
    issuer = one(file, "Issuer", certificate["issuerRef"]["name"])
    assert issuer["spec"]["ca"]["secretName"] == one(file, "Certificate", "tandem-ca")["spec"]["secretName"]
    policy = one(file, "BackendTLSPolicy", "tandem-gateway")["spec"]
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": service}]
    assert policy["validation"]["hostname"] == host


def test_the_pool_selects_the_gateways_and_their_port(chart: Rendered) -> None:
    pool = one("inference-pool.yaml", "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    template = chart.one("gateway-deployment")["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    selected = [
        where
        for where, pod in pods(render({"planner": {"enabled": True}}, release="tandem").objects)
        if pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ]
    assert selected == ["Deployment/tandem-gateway"]
    (container,) = gateway(chart)["containers"]
    http = next(port["containerPort"] for port in container["ports"] if port["name"] == "http")
    assert pool["spec"]["targetPorts"] == [{"number": http}]
    (rule,) = one("inference-pool.yaml", "HTTPRoute")["spec"]["rules"]
    reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    assert rule["backendRefs"] == [reference]


def test_the_picker_runs_where_the_pool_looks_for_it() -> None:
    pool, service = one("inference-pool.yaml", "InferencePool"), one("inference-pool.yaml", "Service")
    picker, accounts = one("inference-pool.yaml", "Deployment")["spec"], one("inference-pool.yaml", "ServiceAccount")
    assert pool["spec"]["endpointPickerRef"]["name"] == service["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    (container,) = picker["template"]["spec"]["containers"]
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == port["port"]
    assert port["port"] in {each["containerPort"] for each in container["ports"]}
    labels = picker["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == picker["selector"]["matchLabels"] == labels
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    assert picker["template"]["spec"]["serviceAccountName"] == accounts["metadata"]["name"]
    assert one("inference-pool.yaml", "RoleBinding")["subjects"][0]["name"] == accounts["metadata"]["name"]


def test_the_picker_reads_what_a_gateway_reports(chart: Rendered) -> None:
    settings = one("inference-pool.yaml", "ConfigMap")["data"]
    (container,) = one("inference-pool.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    (file,) = settings
    assert f"--config-file=/config/{file}" in container["args"]
    config = yaml.load(settings[file], yaml.CSafeLoader)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    served = {operation.path for operation in MetricsRoutes.endpoint_picker.operations}  # type: ignore[attr-defined]
    source = plugins["metrics-data-source"]
    ports = {port["name"]: port["containerPort"] for port in gateway(chart)["containers"][0]["ports"]}
    assert ({source["path"]}, source["port"]) == (served, ports["metrics"])
    # What each scorer of llm-d's picker needs, by its docs/plugin-metric-protocol.md.
    needed = {"queue-scorer": endpoint_metrics.WAITING, "running-requests-size-scorer": endpoint_metrics.RUNNING}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} == needed.keys() <= plugins.keys()


def test_an_objective_is_a_lane() -> None:
    found = objects("inference-pool.yaml", "InferenceObjective")
    ordered = sorted(found, key=lambda objective: -objective["spec"]["priority"])
    assert [objective["metadata"]["name"] for objective in ordered] == [lane.label for lane in Lane]
    assert min(objective["spec"]["priority"] for objective in found) == 0
    pool = one("inference-pool.yaml", "InferencePool")["metadata"]["name"]
    assert {objective["spec"]["poolRef"]["name"] for objective in found} == {pool}


def test_the_canary_s_route_leads_to_both_releases() -> None:
    route = one("canary.yaml", "HTTPRoute")
    shares, own = route["spec"]["rules"]
    releases = [reference["namespace"] for reference in shares["backendRefs"]]
    for reference, release in zip(shares["backendRefs"], releases, strict=True):
        service = render(release=release).one("gateway-service")
        assert reference["name"] == service["metadata"]["name"]
        assert reference["port"] in {port["port"] for port in service["spec"]["ports"]}
    assert sum(reference["weight"] for reference in shares["backendRefs"]) == 100
    assert own["backendRefs"] == [{key: value for key, value in shares["backendRefs"][1].items() if key != "weight"}]
    assert {rule["timeouts"]["request"] for rule in route["spec"]["rules"]} == {"0s"}
    granted = {
        (grant["metadata"]["namespace"], to["name"])
        for grant in objects("canary.yaml", "ReferenceGrant")
        for to in grant["spec"]["to"]
        if {origin["namespace"] for origin in grant["spec"]["from"]} == {route["metadata"]["namespace"]}
    }
    assert granted == {(reference["namespace"], reference["name"]) for reference in shares["backendRefs"]}


def test_the_page_s_commands_change_the_weights() -> None:
    """A JSON patch that names a path that is not there is refused by the API server."""
    route = one("canary.yaml", "HTTPRoute")
    patches = [
        command
        for command in commands(ROOT / "docs" / "kubernetes.md")
        if command[0] == "kubectl" and "httproute" in command
    ]
    assert patches
    for command in patches:
        assert command[command.index("httproute") + 1] == route["metadata"]["name"]
        assert command[command.index("-n") + 1] == route["metadata"]["namespace"]
        patch = json.loads(command[command.index("-p") + 1])
        for step in patch:
            *place, last = step["path"].strip("/").split("/")
            target: Any = route
            for part in place:
                target = target[int(part) if isinstance(target, list) else part]
            assert step["op"] == "replace" and last == "weight" and last in target
        assert sum(step["value"] for step in patch) == 100 and len(patch) == 2


def test_keda_scales_the_gateways_by_metrics_that_exist(chart: Rendered) -> None:
    scaled = one("keda-gateways.yaml", "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {"name": chart.one("gateway-deployment")["metadata"]["name"]}
    assert not chart.has("gateway-hpa"), "two autoscalers would work against each other"
    known = known_series()
    for trigger in scaled["triggers"]:
        names = names_in(trigger["metadata"]["query"])
        assert names.selectors
        for selector in names.selectors:
            assert selector.labels <= known[selector.metric] and "namespace" in selector.labels
    used = {each.metric for trigger in scaled["triggers"] for each in names_in(trigger["metadata"]["query"]).selectors}
    assert used == {"tandem_open_requests", "tandem_planner_target"}
