"""What compose.yaml starts exists, is set as the programs take it, and finds each other; whether it runs only an engine
of containers can tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk import environment_variables

from tandem.cli.gateway_checks import require_auth_if_public
from tandem.core.config import Config
from tandem.core.settings import DEFAULT_LAYER, Resolved, from_environment, resolve, settings
from tandem.obs.otel_settings import read_otel
from tandem.worker.addresses import require_worker_auth
from tests.deploy.dockerfile import read_stages
from tests.deploy.files import DASHBOARDS, DEPLOY, PROMETHEUS, ROOT, read_yaml

COMPOSE = read_yaml(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GATEWAYS, WORKERS = ("gateway",), ("prefill", "decode")
EACH = pytest.mark.parametrize("name", SERVICES)
OWN = pytest.mark.parametrize("name", [*GATEWAYS, *WORKERS])


def resolved(name: str, secret: Path) -> Resolved:
    """The settings that a program of this service has, with its secret where the test has one."""
    environment = {**SERVICES[name]["environment"], "TANDEM_CLUSTER__SECRET_FILE": str(secret)}
    return resolve([(DEFAULT_LAYER, {}), ("environment", from_environment(environment))])


def config(name: str) -> Config:
    return resolved(name, Path("/cluster/secret")).config


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 4)
    return file


@EACH
def test_images_are_pinned_or_built_from_what_is_here(name: str) -> None:
    service = SERVICES[name]
    if "build" not in service:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w-]*", service["image"])
        return
    build = service["build"]
    file = DEPLOY / build["context"] / build["dockerfile"]
    stages = read_stages(file)
    assert build.get("target", "") in {stage.name for stage in stages}
    ignored = (ROOT / ".dockerignore").read_text()
    copied = [rest for stage in stages for rest in stage.all("COPY") if not rest.startswith("--from")]
    for *sources, _ in (rest.split() for rest in copied):
        assert all((ROOT / source).exists() and f"!{source}\n" in ignored for source in sources)


@EACH
def test_what_is_mounted_and_waited_for_exists(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source = volume.split(":")[0]
        assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    assert set(SERVICES[name].get("depends_on", ())) <= SERVICES.keys() - {name}


@EACH
def test_only_this_machine_is_let_in_and_nothing_is_secret(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    for variable in service.get("environment", {}):
        assert not re.search("PASSWORD|TOKEN|KEY$|SECRET$", variable)
    assert service.get("network_mode") == "none" or service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - {"secret", "collector", "jaeger"}))
def test_services_have_health_checks(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


@OWN
def test_variables_are_settings_or_opentelemetry_s(name: str) -> None:
    known = {setting.env for setting in settings()} | {"UCX_TLS", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"}
    known |= {value for value in vars(environment_variables).values() if isinstance(value, str)}
    assert SERVICES[name]["environment"].keys() <= known


@OWN
def test_traces_are_pushed_and_metrics_are_not_counted_twice(name: str) -> None:
    environment = SERVICES[name]["environment"]
    settings = read_otel(environment)
    assert (settings.traces, settings.metrics) == (("otlp",), ())


@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_starts(name: str, secret: Path) -> None:
    require_auth_if_public(resolved(name, secret))
    settings = config(name)
    port, grpc_port = (int(port.split(":")[-1]) for port in SERVICES[name]["ports"])
    assert (settings.gateway.port, settings.gateway.own_grpc_port) == (port, grpc_port)
    assert f":{port}/ready" in SERVICES[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_starts_and_is_found(name: str, secret: Path) -> None:
    require_worker_auth(resolved(name, secret).config)
    settings = config(name).worker
    assert settings.advertise_address == f"{name}:{settings.port}" and settings.id == settings.pool == name
    assert f":{settings.metrics_port}/metrics" in SERVICES[name]["healthcheck"]["test"][-1]


def test_programs_of_one_cluster_agree() -> None:
    configs = [config(name) for name in (*GATEWAYS, *WORKERS)]
    for section in ("redis", "cluster", "slo", "telemetry"):
        assert len({getattr(one, section) for one in configs}) == 1, section
    assert len({one.model for one in configs[len(GATEWAYS) :]}) == 1
    assert configs[0].redis.url.split("//")[1] == "redis:6379" and "redis" in SERVICES
    drain = max(configs[0].gateway.drain_s, *(one.worker.drain_s for one in configs))
    assert all(int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > drain for name in (*GATEWAYS, *WORKERS))


def test_prometheus_finds_the_gateway_and_what_it_reads() -> None:
    found = read_yaml(PROMETHEUS / "prometheus.yml")
    static, discovered = found["scrape_configs"]
    target = f"gateway:{config('gateway').gateway.metrics_port}"
    published = [port.split(":")[-1] for port in SERVICES["gateway"]["ports"]]
    assert target.rpartition(":")[2] not in published, "it needs no key"
    assert static["static_configs"] == [{"targets": [target]}]
    assert discovered["http_sd_configs"][0]["url"] == f"http://{target}/metrics/targets"
    mounted = {Path(volume.split(":")[1]) for volume in SERVICES["prometheus"]["volumes"]}
    home = Path("/etc/prometheus")
    assert {home / name for name in ("prometheus.yml", *found["rule_files"])} <= mounted
    assert f"--config.file={home / 'prometheus.yml'}" in SERVICES["prometheus"]["command"]


def test_the_collector_hands_on_what_it_takes() -> None:
    collector = read_yaml(DEPLOY / "otel" / "collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for part, names in pipeline.items():
            assert set(names) <= collector[part].keys()
    assert set(collector["service"]["extensions"]) == collector["extensions"].keys()
    hosts = {re.sub(r"^https?://", "", one["endpoint"]).split(":")[0] for one in collector["exporters"].values()}
    assert hosts <= SERVICES.keys()
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].split(":")[1]
    for name in (*GATEWAYS, *WORKERS):
        environment = SERVICES[name]["environment"]
        assert environment["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
        assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://collector:{port}"


def test_grafana_has_its_boards_and_where_their_figures_are() -> None:
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    at = {there: DEPLOY / here for here, there in mounted.items()}
    provisioning = at["/etc/grafana/provisioning"]
    (provider,) = read_yaml(provisioning / "dashboards" / "tandem.yaml")["providers"]
    assert at[provider["options"]["path"]].resolve() == DASHBOARDS
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (at[str(home.parent)] / home.name).is_file()
    sources = {one["uid"]: one for one in read_yaml(provisioning / "datasources" / "tandem.yaml")["datasources"]}
    assert all(re.match(r"http://(\w+):", one["url"])[1] in SERVICES for one in sources.values())  # type: ignore[index]
    (trace,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert trace["datasourceUid"] in sources
    interval = read_yaml(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    assert sources["prometheus"]["jsonData"]["timeInterval"] == interval
