"""Values that are wrong are refused, with a message that names the key; never taken for something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.chart.release import CHART, SCHEMA, refusal, render

Node = Mapping[str, Any]
Case = tuple[dict[str, Any], str]
"""Values, and a part of the error message that refuses them."""
GPU = {"role": "prefill", "gpus": 4}
ACTING = {"enabled": True, "mode": "act"}
WITHOUT_AUTOSCALER = {"inTreeAutoscaling": {"enabled": False}}
FAULT_TOLERANT = {"gcsFaultTolerance": {"enabled": True}}
INCREMENTAL = {
    "upgradeStrategy": "NewClusterWithIncrementalUpgrade",
    "incrementalUpgrade": {"gatewayClassName": "istio"},
}


def external_redis(**external: Any) -> dict[str, Any]:
    return {"mode": "external", "external": external}


BY_SCHEMA: list[Case] = [
    ({"gatway": {}}, "(root): Additional property gatway is not allowed"),
    ({"gateway": {"replica": 2}}, "gateway: Additional property replica is not allowed"),
    ({"gateway": {"replicas": 0}}, "gateway.replicas: Must be greater than or equal to 1"),
    ({"gateway": {"replicas": "two"}}, "gateway.replicas: Invalid type"),
    ({"gateway": {"auth": "maybe"}}, "gateway.auth"),
    ({"gateway": {"drain_s": None}}, "gateway: drain_s is required"),
    ({"gateway": {"port": 80}}, "gateway.port: Must be greater than or equal to 1024"),
    ({"gateway": {"resources": {"limits": None}}}, "gateway.resources: limits is required"),
    ({"gateway": {"resources": {"limits": {"memory": None}}}}, "gateway.resources.limits: memory is required"),
    ({"gateway": {"resources": {"limits": {"memory": "1 GB"}}}}, "gateway.resources.limits.memory"),
    ({"gateway": {"service": {"type": "ExternalName"}}}, "gateway.service.type"),
    ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs"),
    ({"gateway": {"host": "127.0.0.1"}}, "gateway: Additional property host is not allowed"),
    ({"gateway": {"env": {"a-b": "c"}}}, "gateway.env"),
    ({"image": {"gateway": {"tag": "latest"}}}, "image.gateway.tag"),
    ({"image": {"worker": {"digest": "sha256:abc"}}}, "image.worker.digest"),
    ({"engine": {"tensor_parallel": 2}}, "engine: Additional property tensor_parallel is not allowed"),
    ({"engine": {"nnodes": 2}}, "engine: Additional property nnodes is not allowed"),
    ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs"),
    ({"engine": {"kv_cache_memory": "lots"}}, "engine.kv_cache_memory"),
    ({"slo": {"ttft_ms": -1}}, "slo.ttft_ms: Must be greater than or equal to 0"),
    ({"handoff": {"lease_s": 0}}, "handoff.lease_s: Must be greater than 0"),
    ({"transfer": {"require": "nvlink"}}, "transfer.require"),
    ({"redis": {"mode": "cluster"}}, "redis.mode"),
    ({"redis": {"url": "redis://me:secret@host"}}, "redis: Additional property url is not allowed"),
    ({"redis": {"external": {"addresses": ["redis://host:6379"]}}}, "redis.external.addresses.0"),
    ({"redis": {"external": {"addresses": ["fd00::1:6379"]}}}, "redis.external.addresses.0"),
    ({"redis": {"external": {"addresses": ["[stores]:6379"]}}}, "redis.external.addresses.0"),
    ({"bindAddress": "10.0.0.1"}, "bindAddress"),
    ({"pools": {"prefill": {"role": "writer"}}}, "pools.prefill.role"),
    ({"pools": {"third": {"replicas": 1}}}, "pools.third: role is required"),
    ({"pools": {"Third": {"role": "mixed"}}}, "pools: Property name of"),
    ({"pools": {"colocated": {"role": "mixed"}}}, "pools: Property name of"),
    ({"pools": {"prefill": {"minReplicas": -2}}}, "pools.prefill.minReplicas: Must be greater than or equal to -1"),
    ({"pools": {"prefill": {"gpu": 1}}}, "pools.prefill: Additional property gpu is not allowed"),
    ({"pools": {"prefill": {"ucx": {"NCCL_DEBUG": "INFO"}}}}, "pools.prefill.ucx"),
    ({"pools": {"prefill": {"rdma": {"resource": "ib"}}}}, "pools.prefill.rdma.resource"),
    ({"ray": {"version": "2.60"}}, "ray.version"),
    ({"ray": {"upgradeStrategy": "Rolling"}}, "ray.upgradeStrategy"),
    ({"ray": {"incrementalUpgrade": {"maxSurgePercent": 0}}}, "ray.incrementalUpgrade.maxSurgePercent"),
    ({"planner": {"percentile": 100, "mode": "on"}}, "planner.mode"),
    ({"cache": {"type": "hostPath"}}, "cache.type"),
    ({"cache": {"accessModes": ["ReadWriteOncePod"]}}, "cache.accessModes.0"),
    ({"otel": {"samplerArg": "2"}}, "otel.samplerArg"),
    ({"networkPolicy": {"dns": [{"podSelectors": {}}]}}, "networkPolicy.dns.0"),
    ({"pools": {"decode": {"lanes": "batch,batch"}}}, "pools.decode.lanes"),
]
BY_RULE: list[Case] = [
    ({"fullnameOverride": "2nd"}, "fullnameOverride: the names of this release begin with 2nd"),
    ({"pools": {"prefill": {"replicas": 2, "maxReplicas": 1}}}, "pools.prefill.replicas is 2"),
    ({"pools": {"prefill": GPU, "decode": {"gpus": 4, "tensorParallel": 2}}}, "pools.decode.tensorParallel is 2"),
    ({"pools": {"prefill": GPU}}, "pools.decode.gpus is 0"),
    (
        {"poolDefaults": {"resources": {"limits": {"memory": "4Gi"}}}},
        "pools.decode.resources.requests.memory is 6Gi, more than limits.memory, which is 4Gi",
    ),
    (
        {"ray": {"head": {"resources": {"limits": {"cpu": "500m"}}}}},
        "ray.head.resources.requests.cpu is 1, more than limits.cpu, which is 500m",
    ),
    (
        {"cache": {"fetch": {"enabled": True, "resources": {"requests": {"memory": 9e9}}}}},
        "cache.fetch.resources.requests.memory is 9e+09, more than limits.memory, which is 8Gi",
    ),
    ({"gateway": {"grpc_port": 8000}}, "gateway.grpc_port is 8000, and so is gateway.port: set different ports"),
    ({"gateway": {"metrics_port": 8001}}, "gateway.metrics_port is 8001, and so is gateway.grpc_port"),
    (
        {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 11}}},
        "gateway.autoscaling.minReplicas is 11, more than maxReplicas, which is 10",
    ),
    (
        {"pools": {"prefill": {"colocate": True}, "decode": {"colocate": True}}, "worker": {"port": 9181}},
        "worker.port is 9181 and worker.metrics_port is 9180: set them at least 2 apart",
    ),
    ({"worker": {"port": 9180}}, "worker.port is 9180 and worker.metrics_port is 9180: set them at least 1 apart"),
    (
        {"pools": {"prefill": {"colocate": True}, "decode": {"colocate": True}}, "worker": {"port": 9179}},
        "worker.port is 9179 and worker.metrics_port is 9180: set them at least 2 apart",
    ),
    ({"pools": {"decode": {"tensorParallel": 3, "podsPerWorker": 2}}}, "pools.decode.podsPerWorker is 2, and a worker"),
    (
        {"pools": {"decode": {"tensorParallel": 2, "podsPerWorker": 2, "replicasPerPod": 2}}},
        "pools.decode.podsPerWorker is 2: a worker of several pods shares none",
    ),
    (
        {"pools": {"decode": {"tensorParallel": 2, "podsPerWorker": 2, "surgePods": 1}}},
        "pools.decode.surgePods is 1: a worker takes 2 pods",
    ),
    (
        {"pools": {"decode": {"tensorParallel": 2, "podsPerWorker": 2}}, "transfer": {"backend": "local"}},
        "transfer.backend is local, and pools.decode.podsPerWorker is 2",
    ),
    ({"pools": {"decode": None}}, "pools: there must be prefill and decode workers"),
    ({"transfer": {"require": "cuda_ipc"}}, "set pools.decode.colocate"),
    (
        {"pools": {"prefill": {"colocate": True, "replicas": 2}, "decode": {"colocate": True}}},
        "pools.decode.replicas, pools.prefill.replicas make 1, 2 pods",
    ),
    (
        {"pools": {"prefill": {"colocate": True}, "decode": {"colocate": True, "nodeSelector": {"disk": "fast"}}}},
        "pools.decode.nodeSelector describes a pod, and colocated pools share theirs",
    ),
    ({"pools": {"prefill": {"minReplicas": 0}}}, "pools.prefill.minReplicas is 0: only the planner starts workers"),
    (
        {"pools": {"all": {"role": "mixed", "minReplicas": 0}}, "planner": ACTING},
        "pools.all.minReplicas is 0: only the planner starts workers of an empty pool, and only prefill and decode",
    ),
    (
        {"pools": {"decode": {"minReplicas": 0}}, "planner": ACTING},
        "pools.decode.minReplicas is 0, and gateway.wake_timeout_s is 0",
    ),
    ({"pools": {"prefill": {"hostNetwork": True}}}, "networkPolicy.nodes is empty"),
    ({"planner": ACTING, "ray": WITHOUT_AUTOSCALER}, "planner.actuator is serve"),
    ({"planner": {**ACTING, "actuator": "raycluster"}}, "planner.actuator is raycluster"),
    ({"planner": {"enabled": True, "mode": "explain", "actuator": "raycluster"}}, "planner.actuator is raycluster"),
    ({"planner": {"enabled": True, "replicas": 2}}, "planner.replicas is 2"),
    ({"ray": {**INCREMENTAL, **WITHOUT_AUTOSCALER}}, "nothing would add pods to the second cluster"),
    (
        {
            "ray": INCREMENTAL,
            "planner": ACTING,
            "pools": {"prefill": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}},
        },
        "pools.prefill.minReplicas is 1, less than replicas",
    ),
    (
        {"ray": {"upgradeStrategy": "NewClusterWithIncrementalUpgrade"}},
        "ray.incrementalUpgrade.gatewayClassName is empty",
    ),
    (
        {"ray": {**INCREMENTAL, "incrementalUpgrade": {"gatewayClassName": "istio", "stepSizePercent": 30}}},
        "ray.incrementalUpgrade.stepSizePercent is 30",
    ),
    (
        {
            "planner": {"enabled": True, "actuator": "raycluster"},
            "ray": WITHOUT_AUTOSCALER,
            "serviceAccount": {"create": False},
        },
        "serviceAccount.planner is empty",
    ),
    ({"planner": {"groups": "prefill=mine"}}, "groups"),
    ({"planner": ACTING, "pools": {"more": {"role": "prefill"}}}, "needs one pool with the role prefill"),
    (
        {
            "planner": {**ACTING, "actuator": "raycluster"},
            "ray": WITHOUT_AUTOSCALER,
            "pools": {"prefill": {"colocate": True}, "decode": {"colocate": True}},
        },
        "pools.prefill.colocate: planner.actuator raycluster",
    ),
    ({"redis": {"mode": "external"}}, "redis.external.addresses is empty"),
    ({"redis": external_redis(urlKey="url")}, "redis.external.existingSecret is empty"),
    ({"redis": external_redis(existingSecret="a", urlKey="url")}, "redis.external.urlPort is 0"),
    (
        {"redis": external_redis(addresses=["a:1"], isCluster=True), "ray": FAULT_TOLERANT},
        "redis.external.isCluster",
    ),
    ({"redis": external_redis(addresses=["a:1", "b:1"])}, "redis.external.addresses: only a Redis Cluster"),
    (
        {
            "redis": external_redis(addresses=["a:1"], existingSecret="s", urlKey="url", urlPort=1),
            "ray": FAULT_TOLERANT,
        },
        "redis.external.urlKey: Ray takes no URL",
    ),
    ({"serviceAccount": {"gateway": "a", "worker": "a"}}, "serviceAccount: create makes an account for each"),
    ({"tenants": {"existingSecret": "a", "content": {"tenants": {}}}}, "tenants.content is given"),
    ({"gateway": {"auth": "off"}, "tenants": {"existingSecret": "a"}}, "gateway.auth is off"),
    ({"gateway": {"tls": {"clientCaSecret": "a"}}}, "gateway.tls.existingSecret is empty"),
]


def rounds(cases: list[Case]) -> list[list[Case]]:
    """Group cases that can be rendered together, because no two of them set the same key."""
    made: list[list[Case]] = []
    for case in cases:
        together = next((one for one in made if not any(clash(case, other) for other in one)), None)
        if together is None:
            made.append(together := [])
        together.append(case)
    return made


def clash(one: Case, other: Case) -> bool:
    return any(
        mine.startswith(theirs) or theirs.startswith(mine) for mine in leaves(one[0]) for theirs in leaves(other[0])
    )


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The keys on the way to each value, with a dot behind each of them."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}."


def merged(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        one[key] = merged(one.get(key, {}), value) if isinstance(value, Mapping) else value
    return one


ROUNDS = rounds(BY_SCHEMA)
"""Helm reports all schema violations of one rendering, so a round tests many cases."""


@pytest.mark.parametrize("together", ROUNDS, ids=lambda together: f"{len(together)} values")
def test_wrong_values_are_refused_by_the_schema(together: list[Case]) -> None:
    given: dict[str, Any] = {}
    for values, _ in together:
        merged(given, values)
    message = refusal(given)
    assert "don't meet the specifications of the schema" in message
    for values, expected in together:
        assert any(line.startswith(f"- {expected}") for line in message.splitlines()), f"{values} {expected}: {message}"


@pytest.mark.parametrize(("values", "expected"), BY_RULE, ids=[case[1][:40] for case in BY_RULE])
def test_what_cannot_be_together_is_refused(values: dict[str, Any], expected: str) -> None:
    assert expected in refusal(values)


def test_a_part_of_resources_keeps_the_rest() -> None:
    render({"gateway": {"resources": {"limits": {"cpu": 1}}}})


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every property, with its path, those of definitions of items and further ones too."""
    for key, value in node.get("properties", {}).items():
        yield f"{path}.{key}", value
        yield from nodes(value, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}[]")


def test_every_key_has_a_description_and_objects_are_closed() -> None:
    seen = list(nodes(SCHEMA))
    assert len(seen) > 400
    for path, node in seen:
        assert node.get("description", "").strip(), path
        if "properties" in node:
            assert node["additionalProperties"] is False or path == ".pools", path
    assert SCHEMA["additionalProperties"] is False


def test_every_key_of_the_chart_has_a_value_and_stands_in_the_schema() -> None:
    """Settings have their values in the programs, entries of maps and shared pods wherever they are given."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = []
    for path, node in nodes(SCHEMA):
        keys = path.strip(".").split(".")
        if "[]" in path or "Setting " in node["description"] or keys[0] in ("global", "colocated"):
            continue
        found: Any = values
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if found is None and keys[-1] not in ("requests", "ephemeral-storage", "engine", "speculative"):
            missing.append(path)
    assert missing == []
