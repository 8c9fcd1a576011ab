"""Every value renders into a config that the programs take, as file and as what Serve hands to workers; a setting that
the chart makes itself is refused, never ignored."""

from __future__ import annotations

from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.gateway_checks import require_auth_if_public
from tandem.core.config import Bytes, value_of
from tandem.core.errors import TandemError
from tandem.core.ray_worker_groups import WorkerGroup, read_groups
from tandem.core.settings import DEFAULT_LAYER, Resolved, Setting, resolve, settings
from tandem.gateway.tenants.tenants_watch import read_tenants
from tandem.worker.addresses import require_worker_auth
from tests.chart.release import CI, NAMESPACE, RELEASE, ROOT, SCHEMA, Rendered, ci, refusal, render

EACH = pytest.mark.parametrize("name", CI)
WORKERS_READ = (
    "model",
    "engine",
    "speculative",
    "slo",
    "lanes",
    "handoff",
    "transfer",
    "worker",
    "redis",
    "cluster",
    "telemetry",
)

SAMPLES: dict[str, Any] = {
    "engine.block_size": 32,
    "engine.max_model_len": 4096,
    "engine.plan_depth": 2,
    "engine.gpu_memory_utilization": 0.5,
    "engine.max_retained_fraction": 0.5,
    "lanes.batch_max_share": 0.5,
    "gateway.rebalance_min_gain": 0.3,
    "gateway.allowed_hosts": "*",
    "gateway.port": 8080,
    "gateway.grpc_port": 9090,
    "gateway.metrics_port": 9200,
    "model.served_name": "one,another",
    "planner.groups": "prefill=fast,decode=wide:2",
    "transfer.nixl_backends": "LIBFABRIC",
    "transfer.network_devices": "eth1,eth2",
    "planner.headroom": 0.25,
    "planner.percentile": 95.5,
    "redis.namespace": "production",
    "worker.port": 50100,
    "worker.metrics_port": 9200,
}
"""Of settings that not every value of their type fits."""


def resolved(tree: dict[str, Any]) -> Resolved:
    return resolve([(DEFAULT_LAYER, {}), ("config.yaml", tree)])


def is_given(setting: Setting) -> bool:
    """Return whether values may set `setting`."""
    return setting.name in SCHEMA["properties"].get(setting.section, {"properties": {}})["properties"]


def sample(setting: Setting) -> Any:
    """Return a valid value other than the setting's default."""
    if setting.key in SAMPLES:
        return SAMPLES[setting.key]
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    samples = {int: 1, float: 1.5, bool: not setting.default, str: "other", Bytes: "64MiB"}
    if setting.type in (int, float):
        return type(setting.default)(setting.default + samples[setting.type])
    return samples[setting.type]


@EACH
def test_the_config_is_one_that_programs_start_with(name: str, tmp_path: Path) -> None:
    found = resolved(readable(ci(name), tmp_path))
    require_auth_if_public(found)
    require_worker_auth(found.config)
    for application in ci(name).applications.values():
        tree = application["args"]["settings"]
        config = resolved({**tree, "cluster": found_cluster(tmp_path, tree)}).config
        require_worker_auth(config)
        assert config.worker.host == "0.0.0.0" and not config.worker.id and not config.worker.advertise_address


def readable(rendered: Rendered, place: Path) -> dict[str, Any]:
    """The config, with files that are there in place of those of pods."""
    tree = rendered.config
    tree["cluster"] = found_cluster(place, tree)
    if "tenants" in tree["gateway"]:
        tree["gateway"]["tenants"] = str(place / "tenants.yaml")
        made = rendered.by_template.get("tenants-secret")
        example = (ROOT / "docs" / "tenants.yaml").read_text()
        (place / "tenants.yaml").write_text(made[0]["stringData"]["tenants.yaml"] if made else example)
    return tree


def found_cluster(place: Path, tree: dict[str, Any]) -> dict[str, str]:
    """TLS files are the cluster's: what the secret guards is guarded without them too."""
    assert tree["cluster"]["secret_file"] == "/etc/tandem-secrets/secret"
    (place / "secret").write_text("0123456789abcdef" * 4)
    return {"secret_file": str(place / "secret")}


ROUNDS = list(
    zip_longest(
        *(
            [s for s in settings() if s.section == section and is_given(s)]
            for section in dict.fromkeys(s.section for s in settings())
        )
    )
)
"""One setting of each section at a time: sections mind each other in very few rules."""


@pytest.mark.parametrize("together", ROUNDS, ids=lambda together: ",".join(s.key for s in together if s))
def test_each_setting_reaches_the_programs(together: tuple[Setting | None, ...]) -> None:
    given: dict[str, Any] = {}
    for setting in filter(None, together):
        given.setdefault(setting.section, {})[setting.name] = sample(setting)
    rendered = render(given)
    found = resolved(rendered.config).config
    workers = [resolved(one["args"]["settings"]).config for one in rendered.applications.values()]
    for setting in filter(None, together):
        expected = value_of(resolved({setting.section: {setting.name: sample(setting)}}).config, setting.key)
        assert expected != setting.default, "the sample shows nothing"
        assert value_of(found, setting.key) == expected, setting.key
        if setting.section in WORKERS_READ and setting.key not in ("worker.port", "worker.metrics_port"):
            assert [value_of(one, setting.key) for one in workers] == [expected, expected], setting.key


def test_names_of_the_gateways_service_are_added_to_the_allowed_hosts() -> None:
    rendered = render({"gateway": {"allowed_hosts": "llm.example.org"}})
    allowed = resolved(rendered.config).config.gateway.host_patterns
    services = [f"{RELEASE}-tandem-{name}.{NAMESPACE}.svc" for name in ("gateway", "gateway-metrics")]
    assert allowed == ("llm.example.org", *services)


def test_rounds_have_every_setting_that_may_be_given() -> None:
    covered = {setting.key for together in ROUNDS for setting in together if setting}
    assert covered == {setting.key for setting in settings() if is_given(setting)} and len(covered) > 80


def test_settings_that_the_chart_makes_are_refused_by_name() -> None:
    owned = [setting for setting in settings() if not is_given(setting) and setting.section in SCHEMA["properties"]]
    given: dict[str, Any] = {}
    for setting in owned:
        given.setdefault(setting.section, {})[setting.name] = sample(setting)
    message = refusal(given)
    assert owned
    for setting in owned:
        assert f"{setting.section}: Additional property {setting.name} is not allowed" in message


def test_the_sections_of_all_programs_are_there_but_that_of_one_machine() -> None:
    sections = {setting.section for setting in settings()}
    assert sections - SCHEMA["properties"].keys() == {"serve"}
    assert render().config.keys() == sections - {"serve"}


def test_no_key_of_the_chart_is_also_a_setting() -> None:
    """Else it would be taken for one, or a setting for it."""
    for section in ("gateway", "redis", "planner", "worker"):
        properties = SCHEMA["properties"][section]["properties"]
        names = {setting.name for setting in settings() if setting.section == section}
        assert not [key for key in properties.keys() - names if "_" in key]
        rendered = render().config[section]
        assert rendered.keys() <= names


def test_numbers_arrive_as_they_are_however_large_or_small() -> None:
    """Helm reads them as floating point."""
    given = {"engine": {"kv_cache_memory": 68719476736, "max_model_len": 10_000_000}, "planner": {"headroom": 1e-7}}
    rendered = render(given)
    for tree in (rendered.config, {**given, "engine": rendered.applications["decode"]["args"]["settings"]["engine"]}):
        config = resolved(tree).config
        assert config.engine.kv_cache_memory == 68719476736 and config.engine.max_model_len == 10_000_000
        assert config.planner.headroom == 1e-7


@pytest.mark.parametrize("address, bracketed", [("0.0.0.0", "0.0.0.0"), ("::", "[::]")])
def test_all_programs_listen_at_the_address_of_the_values(address: str, bracketed: str) -> None:
    values = {"bindAddress": address, "planner": {"enabled": True}, "otel": {"collector": {"enabled": True}}}
    rendered = render(values)
    found = resolved(rendered.config).config
    workers = [one["args"]["settings"]["worker"]["host"] for one in rendered.applications.values()]
    ray = rendered.ray["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["dashboard-host"]
    addresses = [found.gateway.host, found.worker.host, found.planner.host, *workers, ray]
    assert {*addresses, rendered.serve["http_options"]["host"]} == {address}
    collector = yaml.safe_load(rendered.one("collector-configmap")["data"]["collector.yaml"])
    protocols = collector["receivers"]["otlp"]["protocols"].values()
    doors = [collector["extensions"]["health_check"], *protocols]
    assert [door["endpoint"].rpartition(":")[0] for door in doors] == 3 * [bracketed]


def test_pools_have_settings_of_their_own() -> None:
    rendered = render(
        {
            "engine": {"max_num_batched_tokens": 2048, "max_num_seqs": 32},
            "pools": {
                "decode": {
                    "role": "decode",
                    "engine": {"max_num_batched_tokens": 256},
                    "lanes": "interactive,standard",
                },
                "night": {"role": "decode", "engine": {"max_num_batched_tokens": 512}, "lanes": "batch"},
            },
        }
    )
    engines = {pool: one["args"]["settings"]["engine"] for pool, one in rendered.applications.items()}
    assert {pool: engine["max_num_batched_tokens"] for pool, engine in engines.items()} == {
        "prefill": 2048,
        "decode": 256,
        "night": 512,
    }
    configs = {pool: resolved(one["args"]["settings"]).config for pool, one in rendered.applications.items()}
    assert {pool: config.worker.lanes for pool, config in configs.items()} == {
        "prefill": "", "decode": "interactive,standard", "night": "batch",
    }  # fmt: skip
    assert all(engine["max_num_seqs"] == 32 for engine in engines.values())


def test_a_change_of_the_gateways_settings_leaves_the_workers_alone() -> None:
    before, after = render(), render({"gateway": {"max_queued": 7}, "planner": {"headroom": 0.3}})
    assert before.one("rayservice") == after.one("rayservice")
    annotations = [
        one.one("gateway-deployment")["spec"]["template"]["metadata"]["annotations"] for one in (before, after)
    ]
    assert annotations[0] != annotations[1], "gateways read their settings at the start"


def test_a_change_of_the_workers_settings_rolls_replicas_and_no_pod() -> None:
    before, after = render(), render({"engine": {"max_num_seqs": 7}})
    assert before.ray["rayClusterConfig"] == after.ray["rayClusterConfig"]
    assert before.serve != after.serve


def test_the_gateway_accepts_the_key_that_the_chart_generates(tmp_path: Path) -> None:
    secret = render().one("tenants-secret")["stringData"]
    file = tmp_path / "tenants.yaml"
    file.write_text(secret["tenants.yaml"])
    from tandem.admission.api_keys import key_digest

    assert secret["key"].startswith("tdm_") and len(secret["key"]) > 40
    assert key_digest(secret["key"]) in read_tenants(file, "prefer").keys


def test_tenants_of_values_are_taken(tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "docs" / "tenants.yaml").read_text())
    for tenant in content["tenants"].values():
        for key in tenant["keys"]:
            key.pop("expires", None)
    file = tmp_path / "tenants.yaml"
    secret = render({"tenants": {"content": content}}).one("tenants-secret")["stringData"]
    assert secret.keys() == {"tenants.yaml"}
    file.write_text(secret["tenants.yaml"])
    assert {str(name) for name in read_tenants(file, "prefer").tenants} == {"acme", "nightly", "operations", "edge"}


def test_the_limits_of_the_schema_are_the_rules_own() -> None:
    """A number that is less than the schema's minimum is refused, the minimum itself is not for its size."""
    seen = 0
    for setting in filter(is_given, settings()):
        node = SCHEMA["properties"][setting.section]["properties"][setting.name]
        if setting.type in (int, float) and "minimum" in node and node["minimum"] < 1024:
            for number, is_fine in ((node["minimum"], True), (node["minimum"] - 1, False)):
                problem = ""
                try:
                    resolve([("values", {setting.key: number})])
                except TandemError as error:
                    problem = error.message
                assert (f"{setting.key} = {number} (from values) must be {setting.allowed}" not in problem) is is_fine
            seen += 1
    assert seen > 20


def test_the_schema_accepts_the_lanes_of_a_pool_that_the_setting_accepts() -> None:
    node = SCHEMA["properties"]["poolDefaults"]["properties"]["lanes"]
    labels = ["interactive", "standard", "batch", "nightly"]
    for lanes in ("", *(",".join(some) for number in range(1, 5) for some in product(labels, repeat=number))):
        problem = ""
        try:
            resolve([("values", {"worker.lanes": lanes})])
        except TandemError as error:
            problem = error.message
        assert (lanes in node["enum"]) is ("worker.lanes" not in problem), lanes


def test_a_planner_s_config_names_the_release_s_pools_and_objects() -> None:
    pools = {
        "prefill": {"replicas": 2, "minReplicas": 1, "maxReplicas": 8, "replicasPerPod": 2, "surgePods": 1},
        "decode": {"replicas": 3, "tensorParallel": 4, "podsPerWorker": 4},
    }
    planner = {"enabled": True, "mode": "act", "actuator": "raycluster"}
    rendered = render({"planner": planner, "pools": pools, "ray": {"inTreeAutoscaling": {"enabled": False}}})
    planner_config = resolved(rendered.config).config.planner
    assert (
        planner_config.min_prefill,
        planner_config.max_prefill,
        planner_config.min_decode,
        planner_config.max_decode,
    ) == (1, 8, 3, 3)
    assert planner_config.rayservice == rendered.one("rayservice")["metadata"]["name"]
    groups = read_groups(planner_config.groups)
    assert groups == (
        WorkerGroup("prefill", "prefill", num_workers=2, num_spare=1),
        WorkerGroup("decode", "decode", num_pods=4),
    )
    assert {group.name for group in groups} == set(rendered.groups)
    assert (
        planner_config.host == "0.0.0.0"
        and planner_config.lease == "rel-tandem-planner"
        and not planner_config.kubernetes_namespace
    )
