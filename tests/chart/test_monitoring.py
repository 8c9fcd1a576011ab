"""Boards, rules, monitors, collector and the pods of `helm test`, as values say; whether they work in a cluster is not
seen here."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.doctor.pairs import FEW_PAIRS, MEASURE_S
from tests.chart.release import CHART, CI, NAMESPACE, ROOT, Object, Rendered, ci, containers, env, pods, render
from tests.deploy.programs import program

DEPLOY = ROOT / "deploy"
ON, OFF, TRIAL = ci("everything-on"), ci("everything-off"), ci("cpu-trial")
ALL = ("serviceMonitor", "podMonitor", "prometheusRule")


def test_no_monitoring_object_exists_unless_it_is_enabled() -> None:
    kinds = {one["kind"] for one in OFF.objects}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Pod"}
    assert not any(OFF.has(name) for name in ("dashboards", "collector-deployment", "networkpolicy-collector"))


def test_the_boards_are_those_of_deploy() -> None:
    boards = ON.one("dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["metadata"]["annotations"] == {"grafana_folder": "Tandem"}
    written = {path.name: json.loads(path.read_text()) for path in (DEPLOY / "grafana" / "dashboards").glob("*.json")}
    assert len(written) >= 6 and {name: json.loads(text) for name, text in boards["data"].items()} == written


def test_the_rules_are_those_of_deploy_and_prometheus_takes_them(tmp_path: Path) -> None:
    groups = ON.one("prometheusrule")["spec"]["groups"]
    written = [
        group
        for name in ("recording.yaml", "alerts.yaml")
        for group in yaml.safe_load((DEPLOY / "prometheus" / name).read_text())["groups"]
    ]
    assert groups == [{"interval": "10s", **group} for group in written]
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": groups}))
    subprocess.run([program("promtool"), "check", "rules", str(rules)], check=True, timeout=30, capture_output=True)


@pytest.mark.parametrize("kind", ALL)
def test_monitors_have_the_labels_that_an_operator_looks_for(kind: str) -> None:
    rendered = render({"monitoring": {kind: {"enabled": True, "labels": {"release": "stack"}, "interval": "30s"}}})
    (found,) = rendered.kinds(kind[0].upper() + kind[1:])
    assert found["metadata"]["labels"]["release"] == "stack" and "30s" in json.dumps(found["spec"])


def gateway_endpoint(rendered: Rendered) -> Object:
    (endpoint,) = rendered.one("gateway-servicemonitor")["spec"]["endpoints"]
    return dict(endpoint)


def test_gateways_are_scraped_at_a_service_of_their_own() -> None:
    endpoint = gateway_endpoint(ON)
    selector = ON.one("gateway-servicemonitor")["spec"]["selector"]["matchLabels"]
    (service,) = [one for one in ON.kinds("Service") if selector.items() <= one["metadata"]["labels"].items()]
    assert service["spec"]["type"] == "ClusterIP" and endpoint["path"] == "/metrics"
    (port,) = service["spec"]["ports"]
    assert endpoint["port"] == port["name"] and port["port"] == ON.config["gateway"]["metrics_port"]
    template = ON.one("gateway-deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert port["targetPort"] in {each["name"] for each in template["spec"]["containers"][0]["ports"]}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "tandem-gateway"}]


def test_gateways_with_tls_are_scraped_over_tls() -> None:
    endpoint = gateway_endpoint(ON)
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"] == {
        "serverName": "serving-gateway.inference.svc",
        "ca": {"secret": {"name": "serving-gateway-tls", "key": "ca.crt"}},
        "cert": {"secret": {"name": "prometheus-client-tls", "key": "tls.crt"}},
        "keySecret": {"name": "prometheus-client-tls", "key": "tls.key"},
    }
    values: dict[str, Any] = {"gateway": {"tls": {"existingSecret": "a", "caKey": ""}}}
    values["monitoring"] = {"serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "llm.example.org"}}}
    assert gateway_endpoint(render(values))["tlsConfig"] == {"serverName": "llm.example.org"}
    without_tls = render({"monitoring": {"serviceMonitor": {"enabled": True}}})
    assert not {"scheme", "tlsConfig"} & set(gateway_endpoint(without_tls))


def scraped(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """(Worker group, port) -> the labels that are set, of workers that Prometheus finds by their pods."""
    found = {}
    for endpoint in ci(name).one("worker-podmonitor")["spec"]["podMetricsEndpoints"]:
        (group,) = [one["regex"] for one in endpoint["relabelings"] if one.get("action") == "keep"]
        set_to = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"] if "targetLabel" in one}
        found[group, endpoint["port"]] = set_to
    return found


def test_each_worker_with_a_port_of_its_own_is_scraped_once() -> None:
    ports = {
        (name, port["name"])
        for name, group in ON.groups.items()
        for container in group["template"]["spec"]["containers"]
        for port in container.get("ports", ())
        if port["name"].startswith("metrics-")
    }
    labels = scraped("everything-on")
    assert set(labels) == ports and len(ports) == 3
    assert {one["job"] for one in labels.values()} == {"tandem-worker"}
    assert {(group, one["pool"]) for (group, _), one in labels.items()} == {
        ("prefill", "prefill"),
        ("spare", "mixed"),
        ("colocated", "prefill"),
    }
    assert len({one["worker"] for one in labels.values()}) == 3


@pytest.mark.parametrize("several, scraped_values", [(1, set()), (2, {"partly"})])
def test_targets_are_labelled_partly_where_some_workers_are_not_scraped(several: int, scraped_values: set[str]) -> None:
    """Without the label, an alert would never see the workers that are not scraped."""
    pools = {"prefill": {"role": "prefill"}, "decode": {"role": "decode", "replicas": 2, "replicasPerPod": several}}
    rendered = render({"pools": pools, "monitoring": {"podMonitor": {"enabled": True}}})
    endpoints = rendered.one("worker-podmonitor")["spec"]["podMetricsEndpoints"]
    labels = [{one["targetLabel"]: one["replacement"] for one in each["relabelings"][1:]} for each in endpoints]
    assert labels and {one["scraped"] for one in labels if "scraped" in one} == scraped_values
    assert all(("scraped" in one) == bool(scraped_values) for one in labels)


def test_where_all_take_free_ports_no_pod_is_scraped() -> None:
    pools = {"prefill": {"role": "prefill", "replicas": 2}, "decode": {"role": "decode", "replicas": 2}}
    values = {"poolDefaults": {"replicasPerPod": 2}, "pools": pools, "monitoring": {"podMonitor": {"enabled": True}}}
    assert not render(values).has("worker-podmonitor")


def test_the_planner_is_scraped_and_probed_at_its_configured_port() -> None:
    (container,) = ON.one("planner-deployment")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": ON.config["planner"]["metrics_port"]}]
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {
        "/health"
    }
    (endpoint,) = ON.one("planner-podmonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["relabelings"][0]["replacement"]) == ("metrics", "tandem-planner")
    (ingress,) = ON.one("networkpolicy-planner")["spec"]["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": "metrics"}]


def collector(values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the collector's configuration, and the endpoint that programs send to."""
    rendered = render(values)
    (gateway,) = rendered.one("gateway-deployment")["spec"]["template"]["spec"]["containers"]
    text = rendered.one("collector-configmap")["data"]["collector.yaml"]
    return yaml.safe_load(text), env(gateway)["OTEL_EXPORTER_OTLP_ENDPOINT"]


@pytest.mark.parametrize("protocol, port", [("grpc", 4317), ("http/protobuf", 4318)])
def test_programs_send_to_the_collector_of_the_release(protocol: str, port: int) -> None:
    values = {"otel": {"protocol": protocol, "collector": {"enabled": True, "exportEndpoint": "tempo:4317"}}}
    config, endpoint = collector(values)
    assert endpoint == f"http://rel-tandem-collector:{port}"
    service = render(values).one("collector-service")
    assert service["metadata"]["name"] == "rel-tandem-collector" and port in {
        p["port"] for p in service["spec"]["ports"]
    }
    assert config["exporters"]["otlp"] == {"endpoint": "tempo:4317", "tls": {"insecure": False}}


@pytest.mark.parametrize("where", ["tempo:4317", ""])
def test_each_part_of_its_pipeline_is_configured(where: str) -> None:
    config, _ = collector({"otel": {"collector": {"enabled": True, "exportEndpoint": where}}})
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert names and set(names) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])


def test_only_our_pods_reach_the_collector() -> None:
    policy = ON.one("networkpolicy-collector")["spec"]
    (ingress,) = policy["ingress"]
    peers = [one["podSelector"]["matchLabels"] for one in ingress["from"] if "podSelector" in one]
    assert {one["app.kubernetes.io/component"] for one in peers} == {"gateway", "planner", "ray"}
    ports = {port["name"] for _, pod in pods([ON.one("collector-deployment")]) for port in ports_of(pod)}
    assert {port["port"] for port in ingress["ports"]} <= ports


def ports_of(pod: Object) -> list[Object]:
    return [port for container in containers(pod) for port in container["ports"]]


@pytest.mark.parametrize("name", [name for name in CI if name != "everything-off"])
def test_helm_test_sends_requests_over_http_and_grpc_and_runs_the_doctor(name: str) -> None:
    found = {template: ci(name).one(template) for template in ("tests/http", "tests/grpc", "tests/doctor")}
    for pod in found.values():
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test" and pod["spec"]["restartPolicy"] == "Never"
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "test"
    service = ci(name).one("gateway-service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    environment = env(found["tests/http"]["spec"]["containers"][0])
    tls = ci(name).config["gateway"].get("tls_cert_file")
    host = f"{service['metadata']['name']}.{NAMESPACE}.svc"
    assert environment["HTTP"] == f"http{'s' if tls else ''}://{host}:{ports['http']}"
    assert environment["GRPC"] == f"{host}:{ports['grpc']}"
    assert environment.get("TLS") == ("mutual" if tls else None), "the only file with TLS has a client CA too"
    (doctor,) = found["tests/doctor"]["spec"]["containers"]
    assert doctor["command"][:3] == ["tandem", "doctor", "--pairs"]
    assert doctor["command"][3:5] == ["--url", environment["HTTP"]], "the gateway is looked at too"
    assert doctor["command"][7:] == (["--ca-file", environment["CA_FILE"]] if tls else [])


def test_the_doctor_of_helm_test_has_time_for_all_that_it_measures() -> None:
    """Helm's own limit is five minutes, so documents must pass a longer `--timeout`."""
    deadline = TRIAL.one("tests/doctor")["spec"]["activeDeadlineSeconds"]
    assert deadline > FEW_PAIRS * MEASURE_S + 60
    documents = [(CHART / "templates" / "NOTES.txt").read_text(), (ROOT / "docs" / "kubernetes.md").read_text()]
    waits = [int(minutes) for text in documents for minutes in re.findall(r"test .*--logs --timeout (\d+)m", text)]
    assert len(waits) == 2 and all(minutes * 60 > deadline for minutes in waits)


def test_its_pods_have_a_key_where_the_chart_drew_one() -> None:
    rendered = render({})
    environment = env(rendered.one("tests/http")["spec"]["containers"][0])
    assert environment["TANDEM_API_KEY"]["secretKeyRef"] == {"name": "rel-tandem-tenants", "key": "key"}
    assert "key" in rendered.one("tenants-secret")["stringData"]
    own = render({"tenants": {"existingSecret": "ours"}})
    assert "TANDEM_API_KEY" not in env(own.one("tests/http")["spec"]["containers"][0])
