"""Test how values set Redis, secrets, accounts, the planner's rights and network policies; no real network is used."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import RedisCluster
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from tandem.core.settings import from_environment, resolve
from tandem.doctor.kubernetes import required_permissions
from tandem.stores.embedded_redis import find_program
from tandem.stores.redis_client import RedisClient
from tests.chart.release import CHART, CI, Object, Rendered, ci, env, gateway, pods, render
from tests.ports import free_port

EACH = pytest.mark.parametrize("name", CI)
OFF, ON, TRIAL = ci("everything-off"), ci("everything-on"), ci("cpu-trial")
RDMA, EXTERNAL = ci("rdma"), ci("external-redis")


def redis_url(rendered: Rendered) -> str:
    """Return the Redis URL of a gateway's environment, with a password filled in."""
    environment = env(gateway(rendered)["containers"][0])
    return environment["TANDEM_REDIS__URL"].replace("$(STORE_PASSWORD)", "pass")


@pytest.mark.parametrize("name", ["rdma", "external-redis"])
def test_an_external_redis_has_a_url_that_the_client_takes(name: str) -> None:
    url = redis_url(ci(name))
    resolve([("environment", from_environment({"TANDEM_REDIS__URL": url}))])
    client = RedisClient(url)
    assert isinstance(client.redis, RedisCluster) is (name == "external-redis")
    assert not any(ci(name).has(template) for template in ("redis-deployment", "redis-service", "redis-secret"))


def test_tls_user_and_password_of_an_external_redis() -> None:
    assert redis_url(RDMA) == "rediss://:pass@redis.stores:6380/0?ssl_ca_certs=/etc/tandem-redis/ca.crt"
    nodes = "redis-0.stores:6379,redis-1.stores:6379"
    assert redis_url(EXTERNAL) == f"rediss+cluster://tandem:pass@{nodes}?ssl_ca_certs=/etc/tandem-redis/ca.crt"
    pod = gateway(EXTERNAL)
    (volume,) = [one for one in pod["volumes"] if one["name"] == "redis-ca"]
    assert volume["secret"] == {"secretName": "redis-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    password = env(pod["containers"][0])["STORE_PASSWORD"]
    assert password == {"secretKeyRef": {"name": "redis-tandem", "key": "password"}}


def test_an_external_redis_can_do_without_all_of_that() -> None:
    external = {"addresses": ["stores:6379"], "tls": {"enabled": False}, "database": 3}
    assert redis_url(render({"redis": {"mode": "external", "external": external}})) == "redis://stores:6379/3"


def test_a_whole_redis_url_is_read_from_a_secret() -> None:
    rendered = render(
        {"redis": {"mode": "external", "external": {"existingSecret": "store", "urlKey": "uri", "urlPort": 6380}}}
    )
    environment = env(gateway(rendered)["containers"][0])
    assert environment["TANDEM_REDIS__URL"] == {"secretKeyRef": {"name": "store", "key": "uri"}}
    assert "STORE_PASSWORD" not in environment


def test_the_built_in_redis_requires_its_password() -> None:
    (container,) = TRIAL.one("redis-deployment")["spec"]["template"]["spec"]["containers"]
    assert env(container)["REDISCLI_AUTH"]["secretKeyRef"] == {"name": "rel-tandem-redis", "key": "password"}
    script = container["command"][-1]
    assert "'requirepass " in script and "--maxmemory 256mb" in script and "--requirepass" not in script
    secret = TRIAL.one("redis-secret")["stringData"]
    service = TRIAL.one("redis-service")
    assert secret["url"] == f"redis://:{secret['password']}@{service['metadata']['name']}:6379/0"
    assert len(secret["password"]) >= 32 and secret["password"].isalnum()
    resolve([("environment", from_environment({"TANDEM_REDIS__URL": secret["url"]}))])
    assert env(gateway(TRIAL)["containers"][0])["TANDEM_REDIS__URL"]["secretKeyRef"]["key"] == "url"


@pytest.mark.redis
@pytest.mark.parametrize("password", ["drawn", 'it\'s "a\\b" #1'])
def test_the_built_in_redis_starts_and_is_shut_to_strangers(tmp_path: Path, password: str) -> None:
    """Run the container's command with this machine's redis-server, in another folder and at another port."""
    (container,) = TRIAL.one("redis-deployment")["spec"]["template"]["spec"]["containers"]
    shell, flags, script = container["command"]
    port = free_port()
    (tmp_path / "redis-server").symlink_to(find_program())
    script = script.replace("/data", str(tmp_path)).rstrip() + f" --bind 127.0.0.1 --port {port}"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": password}
    server = subprocess.Popen([shell, flags, script], env=environment, stdout=subprocess.DEVNULL)
    try:
        retry = Retry(ConstantBackoff(0.05), 200)
        with Redis(port=port, password=password, retry=retry, retry_on_error=[RedisConnectionError]) as known:
            assert known.ping() and known.config_get("maxmemory") == {"maxmemory": str(256 << 20)}
        with Redis(port=port, retry=Retry(ConstantBackoff(0.0), 0)) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
    finally:
        server.terminate()
    assert server.wait(10) == 0, "it takes the signal itself"


def test_secrets_that_are_there_are_used_and_not_made() -> None:
    rendered = render(
        {
            "cluster": {"existingSecret": "one"},
            "tenants": {"existingSecret": "two", "key": "file"},
            "redis": {"builtin": {"existingSecret": "three"}},
        }
    )
    assert not rendered.kinds("Secret")
    assert secret_files(gateway(rendered)) == {"secret": ("one", "secret"), "tenants.yaml": ("two", "file")}
    assert env(gateway(rendered)["containers"][0])["TANDEM_REDIS__URL"]["secretKeyRef"]["name"] == "three"


def secret_files(pod: Object) -> dict[str, tuple[str, str]]:
    """Return the Secret and key of each file below /etc/tandem-secrets."""
    (volume,) = [one["projected"] for one in pod["volumes"] if one["name"] == "secrets"]
    sources = [source["secret"] for source in volume["sources"]]
    return {item["path"]: (secret["name"], item["key"]) for secret in sources for item in secret["items"]}


def test_the_gateways_certificate_is_mounted_as_a_folder_and_only_where_it_is_used() -> None:
    files = secret_files(gateway(ON))
    assert files["gateway-tls.crt"] == ("serving-gateway-tls", "tls.crt")
    assert files["gateway-tls.key"] == ("serving-gateway-tls", "tls.key")
    assert files["gateway-client-ca.crt"] == ("client-ca", "ca.crt")
    (mount,) = [m for m in gateway(ON)["containers"][0]["volumeMounts"] if m["name"] == "secrets"]
    assert mount == {"name": "secrets", "mountPath": "/etc/tandem-secrets", "readOnly": True}, "a subPath never changes"
    for template in ("tests/http", "tests/doctor"):
        assert secret_files(ON.one(template)["spec"])["gateway-ca.crt"] == ("serving-gateway-tls", "ca.crt")
    public = render({"gateway": {"tls": {"existingSecret": "a", "caKey": ""}}})
    assert "gateway-ca.crt" not in secret_files(public.one("tests/http")["spec"])


@EACH
def test_settings_name_files_that_are_mounted(name: str) -> None:
    """In every pod that has the settings. Gateways and the doctor also look at files that only gateways use; pods of
    `helm test` have the CA of the gateways' certificate too."""
    rendered = ci(name)
    cluster, gateways = rendered.config["cluster"], rendered.config["gateway"]
    own = {
        gateways[key] for key in ("tenants", "tls_cert_file", "tls_key_file", "tls_client_ca_file") if key in gateways
    }
    ca = {"/etc/tandem-secrets/gateway-ca.crt"} if "tls_cert_file" in gateways else set()
    seen = set()
    for where, pod in pods(rendered.objects):
        settings = {"name": "config", "configMap": {"name": rendered.one("configmap")["metadata"]["name"]}}
        if settings not in pod["spec"].get("volumes", ()):
            continue
        part = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        files = {f"/etc/tandem-secrets/{path}" for path in secret_files(pod["spec"])}
        expected = {*cluster.values()} | (own if part in ("gateway", "test") else set())
        expected |= ca if part == "test" else set()
        assert files == expected, where
        for container in pod["spec"]["containers"]:
            assert {"/etc/tandem", "/etc/tandem-secrets"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
        seen.add(part)
    planner = {"planner"} if rendered.has("planner-deployment") else set()
    tests = {"test"} if rendered.has("tests/doctor") else set()
    assert seen == {"gateway", "ray"} | planner | tests


def test_no_key_is_required_where_auth_is_off() -> None:
    assert not OFF.has("tenants-secret") and "tenants" not in OFF.config["gateway"]
    assert resolve([("config.yaml", OFF.config)]).config.gateway.auth == "off"


@pytest.mark.parametrize(
    ("template", "key"), [("cluster-secret", "secret"), ("redis-secret", "password"), ("tenants-secret", "key")]
)
def test_an_upgrade_keeps_generated_secrets(template: str, key: str) -> None:
    """`lookup` needs a cluster, so the template text is checked: a random value is only the default of the old one."""
    text = (CHART / "templates" / f"{template}.yaml").read_text()
    assert text.count("randAlphaNum") == 1
    (line,) = [line for line in text.splitlines() if "randAlphaNum" in line]
    assert re.search(rf'include "tandem\.kept" \(list \. .*"{key}"\) \| default \(.*randAlphaNum', line)
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    kept = helpers.partition('define "tandem.kept"')[2].partition("\n{{- end }}")[0]
    assert 'lookup "v1" "Secret" (first .).Release.Namespace (index . 1)' in kept and "b64dec" in kept
    assert f'"{key}"' in text and render().one(template)["stringData"][key]


def test_two_installations_have_two_secrets() -> None:
    secrets = {render(release=name).one("cluster-secret")["stringData"]["secret"] for name in ("one", "two", "three")}
    assert len(secrets) == 3 and all(len(secret) >= 32 for secret in secrets)


def test_accounts_are_made_or_named() -> None:
    assert len(ON.kinds("ServiceAccount")) == 4 and len(TRIAL.kinds("ServiceAccount")) == 2
    assert all(one["metadata"]["annotations"] for one in ON.kinds("ServiceAccount"))
    assert not OFF.kinds("ServiceAccount") and gateway(OFF)["serviceAccountName"] == "default"
    rendered = render({"serviceAccount": {"create": False, "gateway": "mine"}})
    assert gateway(rendered)["serviceAccountName"] == "mine"
    names = {one["metadata"]["name"] for one in TRIAL.kinds("ServiceAccount")}
    assert {gateway(TRIAL)["serviceAccountName"], worker_account(TRIAL)} == names


def worker_account(rendered: Rendered) -> str:
    return rendered.groups["decode"]["template"]["spec"]["serviceAccountName"]


@EACH
def test_only_a_planner_that_patches_has_rights_and_no_more_than_it_needs(name: str) -> None:
    rendered = ci(name)
    kinds = {one["kind"] for one in rendered.objects}
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds
    if rendered.config["planner"]["actuator"] != "raycluster":
        assert not rendered.has("planner-role") and not rendered.has("planner-rolebinding")
        return
    role, binding = rendered.one("planner-role"), rendered.one("planner-rolebinding")
    assert {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]} == {
        "leases": ["get", "create", "update"],
        "pods": ["list", "watch"],
        "rayservices": ["get"],
        "rayclusters": ["get", "patch"],
    }
    granted = {
        (g, r, v) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }
    required = {tuple(one) for one in required_permissions(resolve([("config.yaml", rendered.config)]).config)}
    assert required and required <= granted, "the doctor misses none"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = rendered.one("planner-deployment")["spec"]["template"]["spec"]
    assert binding["subjects"][0]["name"] == pod["serviceAccountName"]


@pytest.mark.parametrize("name", ["everything-on", "rdma", "planner"])
def test_the_planner_is_a_program_with_the_same_settings(name: str) -> None:
    made = ci(name).one("planner-deployment")["spec"]
    (container,) = made["template"]["spec"]["containers"]
    assert container["args"] == ["planner", "--config", "/etc/tandem/config.yaml"]
    assert container["image"] == gateway(ci(name))["containers"][0]["image"]
    assert made["strategy"] == {"type": "Recreate"}, "one says what is to be"
    settings = resolve([("config.yaml", ci(name).config)]).config.planner
    assert container["ports"] == [{"name": "metrics", "containerPort": settings.metrics_port}]
    assert settings.host == "0.0.0.0" and container["livenessProbe"]["httpGet"] == {
        "path": "/health",
        "port": "metrics",
    }
    assert rules(ci(name).one("networkpolicy-planner"), "ingress", "") == ["metrics"]


def test_there_is_no_planner_unless_it_is_enabled() -> None:
    assert not any("planner" in template for template in TRIAL.by_template)
    assert ON.config["planner"]["headroom"] == 0.2
    assert ON.one("planner-deployment")["spec"]["template"]["metadata"]["labels"]["tier"] == "edge"
    pod_specs = {name: ci(name).one("planner-deployment")["spec"]["template"]["spec"] for name in ("rdma", "planner")}
    assert [pod["automountServiceAccountToken"] for pod in pod_specs.values()] == [False, True]


def test_a_planner_that_patches_has_pods_to_add_and_to_take_away() -> None:
    pod_counts = {name: (group["minReplicas"], group["maxReplicas"]) for name, group in ci("planner").groups.items()}
    assert pod_counts == {"prefill": (1, 4), "decode": (1, 3)}, "two workers in a pod that decodes"
    assert ci("planner").one("planner-deployment")["spec"]["replicas"] == 2


# ---- network policies


def rules(policy: Object, direction: str, peer: str) -> list[Any]:
    """Return the ports of the rules for pods of a component, or for `anyone`; None as a port means all ports."""
    other = {"ingress": "from", "egress": "to"}[direction]
    found: list[Any] = []
    for rule in policy["spec"][direction]:
        names = set(components(rule.get(other, [{}])))
        if peer in names or (peer == "anyone" and not rule.get(other)):
            found += [port["port"] for port in rule.get("ports", [{"port": None}])]
    return found


def egress_ports(policy: Object) -> list[Any]:
    return [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())]


def components(peers: Iterable[Object]) -> Iterable[str]:
    for peer in peers:
        labels = peer.get("podSelector", {}).get("matchLabels", {})
        yield labels.get("app.kubernetes.io/component", "")


def test_policies_are_there_or_not() -> None:
    assert not OFF.kinds("NetworkPolicy")
    names = {one["metadata"]["name"] for one in ON.kinds("NetworkPolicy")}
    assert {f"serving-{which}" for which in ("gateway", "ray", "ray-head", "redis", "planner")} <= names
    for policy in ON.kinds("NetworkPolicy"):
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}, "all else is refused, both ways"


def test_all_ports_are_open_among_ray_pods_and_only_there() -> None:
    for name in ("cpu-trial", "rdma", "mixed"):
        policy = ci(name).one("networkpolicy-ray")
        assert None in rules(policy, "ingress", "ray") and None in rules(policy, "egress", "ray")
        for other in ("gateway", "test", "anyone"):
            assert None not in rules(policy, "ingress", other)
    elsewhere = [one for one in TRIAL.kinds("NetworkPolicy") if one is not TRIAL.one("networkpolicy-ray")]
    assert not any(None in rules(one, "ingress", "ray") for one in elsewhere)


def test_gateways_reach_workers_at_the_ports_where_they_listen() -> None:
    for name, ports in (("cpu-trial", [50051]), ("one-node-nvlink", [50051, 50052]), ("mixed", [32768])):
        assert rules(ci(name).one("networkpolicy-gateway"), "egress", "ray") == ports
        assert rules(ci(name).one("networkpolicy-ray"), "ingress", "gateway") == ports
    assert rules(ON.one("networkpolicy-planner"), "egress", "ray") == rules(
        ON.one("networkpolicy-ray"), "ingress", "planner"
    )
    assert rules(ON.one("networkpolicy-planner"), "egress", "ray")
    (open_range,) = ci("mixed").one("networkpolicy-gateway")["spec"]["egress"][0]["ports"]
    assert open_range["endPort"] == 60999


def test_gateways_accept_connections_from_everybody_or_from_the_peers_in_values() -> None:
    assert rules(TRIAL.one("networkpolicy-gateway"), "ingress", "anyone") == ["http", "grpc"]
    named = ON.one("networkpolicy-gateway")
    assert rules(named, "ingress", "anyone") == []
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}} in named["spec"][
        "ingress"
    ][0]["from"]
    assert rules(named, "ingress", "test") == ["http", "grpc"]


EVERYWHERE = [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}]
URL = {"existingSecret": "store", "urlKey": "uri", "urlPort": 6390}
BEYOND: list[tuple[dict[str, Any], str, list[int]]] = [
    ({"redis": {"mode": "external", "external": URL}}, "gateway", [6390]),
    (
        {"redis": {"mode": "external", "external": {"addresses": ["a:1", "b:1", "c:2"], "isCluster": True}}},
        "gateway",
        [1, 2],
    ),
    ({"redis": {"mode": "external", "external": {"addresses": ["[fd00::1]:6391"]}}}, "gateway", [6391]),
    ({"otel": {"endpoint": "http://collector.elsewhere:4319"}}, "gateway", [4319]),
    ({"otel": {"endpoint": "https://[fd00::1]:4319/v1"}}, "gateway", [4319]),
    ({"otel": {"endpoint": "https://collector"}}, "gateway", [443]),
    ({"otel": {"endpoint": "http://collector", "protocol": "http/protobuf"}}, "gateway", [80]),
    ({"otel": {"collector": {"enabled": True, "exportEndpoint": "tempo:4320"}}}, "collector", [4320]),
]


@pytest.mark.parametrize(("values", "who", "ports"), BEYOND, ids=str)
def test_what_is_elsewhere_is_reached_at_its_ports_and_no_other(
    values: dict[str, Any], who: str, ports: list[int]
) -> None:
    egress = render(values).one(f"networkpolicy-{who}")["spec"]["egress"]
    (rule,) = [rule for rule in egress if rule["to"] == EVERYWHERE]
    assert rule["ports"] == [{"protocol": "TCP", "port": port} for port in ports]


@EACH
def test_no_rule_opens_all_ports_but_among_ray_pods(name: str) -> None:
    for policy in ci(name).kinds("NetworkPolicy"):
        for rule in [*policy["spec"]["ingress"], *policy["spec"]["egress"]]:
            assert rule.get("ports") or "ray" in components(rule.get("from", rule.get("to")))


def test_a_list_without_peers_means_nobody() -> None:
    keys = ("metricsFrom", "operatorFrom", "dns", "modelsTo", "apiServerTo", "redisTo", "otelTo")
    collector = {"enabled": True, "exportEndpoint": "tempo:4317"}
    for endpoint in ("", "http://elsewhere:4317"):
        rendered = render(
            {
                "networkPolicy": {key: [] for key in keys},
                "redis": {"mode": "external", "external": URL},
                "otel": {"endpoint": endpoint, "collector": collector},
            }
        )
        for policy in rendered.kinds("NetworkPolicy"):
            assert all(rule.get("from") for rule in policy["spec"]["ingress"][1:])
            assert all(rule["to"] for rule in policy["spec"]["egress"])
        for direction in ("ingress", "egress"):
            assert rendered.one("networkpolicy-ray-head")["spec"][direction] == []
        assert rendered.one("networkpolicy-collector")["spec"]["egress"] == []


def test_redis_is_for_our_pods_only() -> None:
    policy = TRIAL.one("networkpolicy-redis")
    assert policy["spec"]["egress"] == []
    (rule,) = policy["spec"]["ingress"]
    assert set(components(rule["from"])) == {"gateway", "ray", "planner", "test"}
    assert [port["port"] for port in rule["ports"]] == ["redis"]
    assert not EXTERNAL.has("networkpolicy-redis")
    for template in ("networkpolicy-gateway", "networkpolicy-ray"):
        assert rules(TRIAL.one(template), "egress", "redis") == [6379]
        ports = egress_ports(RDMA.one(template))
        assert 6380 in ports and 6379 not in ports


def test_kuberay_reaches_the_submit_and_dashboard_ports_of_the_head() -> None:
    policy = TRIAL.one("networkpolicy-ray-head")
    assert policy["spec"]["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    (rule,) = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [8265, 8000]
    assert rule["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    head = TRIAL.ray["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {8265, 8000} <= {port["containerPort"] for port in head["ports"]}


@EACH
def test_the_api_is_reached_by_those_who_have_a_token(name: str) -> None:
    rendered = ci(name)
    reach = {
        one["metadata"]["name"].removeprefix("serving-").removeprefix("rel-tandem-")
        for one in rendered.kinds("NetworkPolicy")
        if 6443 in egress_ports(one)
    }
    scales = rendered.ray["rayClusterConfig"]["enableInTreeAutoscaling"]
    planned = rendered.config["planner"]["actuator"] == "raycluster"
    expected = ({"ray-head"} if scales else set()) | ({"planner"} if planned else set())
    assert reach == (expected if rendered.kinds("NetworkPolicy") else set())


def test_names_are_resolved_by_all_and_spans_go_to_the_collector() -> None:
    for template in ("networkpolicy-gateway", "networkpolicy-ray", "networkpolicy-planner"):
        assert egress_ports(ON.one(template)).count(53) == 2
        assert rules(ON.one(template), "egress", "collector") == [4317, 4318]
    assert rules(TRIAL.one("networkpolicy-gateway"), "egress", "collector") == []


def test_prometheus_reaches_metrics_and_nothing_else() -> None:
    def from_monitoring(policy: Object) -> list[Any]:
        peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        found = [rule for rule in policy["spec"]["ingress"] if peer in rule.get("from", ())]
        return [port["port"] for rule in found for port in rule["ports"]]

    assert from_monitoring(TRIAL.one("networkpolicy-gateway")) == ["metrics"]
    assert from_monitoring(TRIAL.one("networkpolicy-ray")) == [9180]
    assert from_monitoring(TRIAL.one("networkpolicy-redis")) == []
    assert from_monitoring(ci("mixed").one("networkpolicy-ray")) == [], "NIXL's ports are among the free ones"


def test_models_are_fetched_over_https_or_not_at_all() -> None:
    without = render({"networkPolicy": {"modelsTo": []}})
    assert 443 in egress_ports(TRIAL.one("networkpolicy-ray"))
    assert 443 not in egress_ports(without.one("networkpolicy-ray"))


def test_pods_in_the_nodes_network_are_known_by_their_addresses() -> None:
    node = {"ipBlock": {"cidr": "10.20.0.0/16"}}
    for template, direction, other in (
        ("networkpolicy-ray", "ingress", "from"),
        ("networkpolicy-ray", "egress", "to"),
        ("networkpolicy-gateway", "egress", "to"),
    ):
        assert any(node in rule.get(other, ()) for rule in RDMA.one(template)["spec"][direction]), (template, direction)
    assert node in ON.one("networkpolicy-redis")["spec"]["ingress"][0]["from"]
    assert not any(node in rule["to"] for rule in TRIAL.one("networkpolicy-gateway")["spec"]["egress"])
