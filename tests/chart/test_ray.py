"""The RayService: worker groups and applications of pools, what their pods have and how they end; never a cluster."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import ray

from tandem.core.settings import from_environment, resolve
from tests.chart.release import CI, Object, Rendered, ci, containers, env, render

EACH = pytest.mark.parametrize("name", CI)
OFF, ON, TRIAL = ci("everything-off"), ci("everything-on"), ci("cpu-trial")
NVLINK, RDMA, MIXED = ci("one-node-nvlink"), ci("rdma"), ci("mixed")


def worker(rendered: Rendered, group: str) -> Object:
    (found,) = rendered.groups[group]["template"]["spec"]["containers"]
    return found


def head(rendered: Rendered) -> Object:
    return rendered.ray["rayClusterConfig"]["headGroupSpec"]


def slots(group: Object) -> dict[str, int]:
    """Ray's own resources of a pod of the group. KubeRay puts them into a line of a shell as they are, and parses what
    is between the single quotes.
    """
    text = group["rayStartParams"]["resources"]
    (of_the_shell,) = shlex.split(text)
    assert text == f"'{of_the_shell}'"
    parsed: dict[str, int] = json.loads(of_the_shell)
    return parsed


def num_pods(rendered: Rendered, resource: str) -> int:
    """Return the number of pods of a worker of the pool whose slots are the Ray resource `resource`."""
    engine = rendered.applications[resource.removeprefix("tandem-")]["args"]["settings"]["engine"]
    return int(engine.get("nnodes", 1))


@EACH
def test_the_ranks_of_an_example_divide_eight_kv_heads(name: str) -> None:
    for application in ci(name).applications.values():
        assert 8 % application["args"]["settings"]["engine"]["tensor_parallel"] == 0


def test_ray_is_the_version_that_is_tested() -> None:
    assert TRIAL.ray["rayClusterConfig"]["rayVersion"] == ray.__version__


@EACH
def test_each_pool_is_an_application_whose_workers_find_a_pod(name: str) -> None:
    rendered = ci(name)
    offered: dict[str, int] = {}
    for group in rendered.groups.values():
        assert not offered.keys() & slots(group).keys()
        offered |= slots(group)
    assert offered.keys() == {f"tandem-{pool}" for pool in rendered.applications}
    for pool, application in rendered.applications.items():
        assert application["name"] == application["deployments"][0]["name"] == f"tandem-{pool}"
        assert application["import_path"] == "tandem.worker.serve.application:build"
        assert application["route_prefix"] == f"/tandem-{pool}", "without a route no pod gets ready"
        assert application["args"]["resources"] == {f"tandem-{pool}": 1}
        assert not {"ray_actor_options", "placement_group_bundles"} & application["deployments"][0].keys()


@EACH
def test_the_builder_takes_its_arguments_and_the_pod_s_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.worker.serve.application import build

    for variable, value in env(next(iter(ci(name).groups.values()))["template"]["spec"]["containers"][0]).items():
        if variable.startswith("TANDEM_"):
            monkeypatch.setenv(variable, value if isinstance(value, str) else "redis://somewhere")
    for application in ci(name).applications.values():
        built = build(application["args"])
        assert built._bound_deployment.name == application["name"]


@EACH
def test_a_pod_has_the_ray_resources_that_its_workers_request(name: str) -> None:
    for group in ci(name).groups.values():
        cpus = gpus = 0
        for resource, workers in slots(group).items():
            args = ci(name).applications[resource.removeprefix("tandem-")]["args"]
            ranks = args["settings"]["engine"]["tensor_parallel"] // num_pods(ci(name), resource)
            cpus, gpus = cpus + workers * ranks, gpus + workers * ranks * args["num_gpus"]
        params, (container,) = group["rayStartParams"], group["template"]["spec"]["containers"]
        assert (params["num-cpus"], params["num-gpus"]) == (str(cpus), str(gpus))
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
        assert container["resources"]["requests"].get("nvidia.com/gpu", 0) == gpus


@EACH
def test_there_are_pods_for_all_workers_and_for_one_more(name: str) -> None:
    rendered = ci(name)
    scales = rendered.ray["rayClusterConfig"]["enableInTreeAutoscaling"]
    for group in rendered.groups.values():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        for resource, per_pod in slots(group).items():
            deployment = rendered.applications[resource.removeprefix("tandem-")]["deployments"][0]
            bounds = deployment.get("autoscaling_config", {})
            least, most = (bounds.get(f"{end}_replicas", deployment.get("num_replicas")) for end in ("min", "max"))
            pods = num_pods(rendered, resource)
            assert group["maxReplicas"] * per_pod >= pods * (most + scales)
            is_incremental = "clusterUpgradeOptions" in rendered.ray["upgradeStrategy"]
            assert (group["minReplicas"] == 0) if is_incremental else (group["minReplicas"] * per_pod >= pods * least)
            # Without a pod to come a new worker would wait for ever.
            assert (deployment.get("max_surge_percent") == 0) is (not scales)


@pytest.mark.parametrize("scales", [True, False])
def test_a_pool_whose_least_number_is_0_begins_with_its_replicas_and_may_lose_all_pods(scales: bool) -> None:
    pools = {
        "prefill": {"minReplicas": 0, "maxReplicas": 4},
        "decode": {"replicas": 2, "minReplicas": 0, "surgePods": 1},
    }
    planner = {"enabled": True, "mode": "act", "actuator": "serve" if scales else "raycluster"}
    values = {
        "pools": pools, "planner": planner, "gateway": {"wake_timeout_s": 600},
        "ray": {"inTreeAutoscaling": {"enabled": scales}},
    }  # fmt: skip
    rendered = render(values)
    for name, number in (("prefill", 1), ("decode", 2)):
        bounds = rendered.applications[name]["deployments"][0]["autoscaling_config"]
        assert (bounds["min_replicas"], bounds["initial_replicas"]) == (0, number)
    spare = 0 if scales else 1
    assert [rendered.groups[name]["minReplicas"] for name in ("prefill", "decode")] == [0, spare]
    assert rendered.groups["decode"]["replicas"] == 2 + spare
    assert (rendered.config["planner"]["min_prefill"], rendered.config["planner"]["min_decode"]) == (0, 0)
    assert rendered.config["gateway"]["wake_timeout_s"] == 600


def test_spare_pods_are_for_rolling_updates() -> None:
    values = {"ray": {"inTreeAutoscaling": {"enabled": False}}, "poolDefaults": {"surgePods": 1}}
    rendered = render(values)
    group = rendered.groups["decode"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    assert "max_surge_percent" not in rendered.applications["decode"]["deployments"][0]


def test_colocated_pools_share_pods_with_ports_of_their_own() -> None:
    assert NVLINK.groups.keys() == {"colocated"}
    group = NVLINK.groups["colocated"]
    assert slots(group) == {"tandem-decode": 1, "tandem-prefill": 1} and group["replicas"] == 1
    worker_settings = [NVLINK.applications[pool]["args"]["settings"]["worker"] for pool in ("decode", "prefill")]
    assert [(one["port"], one["metrics_port"]) for one in worker_settings] == [(50051, 9180), (50052, 9181)]
    ports = {one["name"]: one["containerPort"] for one in worker(NVLINK, "colocated")["ports"]}
    assert ports == {"serve": 8000, "grpc-0": 50051, "metrics-0": 9180, "grpc-1": 50052, "metrics-1": 9181}
    on_cpus = render({"pools": {"prefill": {"colocate": True}, "decode": {"colocate": True}}})
    for rendered in (NVLINK, on_cpus):
        assert "UCX_TLS" not in env(worker(rendered, "colocated")), "UCX takes shared memory and CUDA IPC by itself"
    limits = worker(NVLINK, "colocated")["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": 2}
    assert group["template"]["spec"]["nodeSelector"] and group["template"]["spec"]["tolerations"]


def test_workers_on_the_nodes_network_leave_node_exporter_its_port() -> None:
    """Ports of such a pod are the node's: where one is taken the pod waits for ever."""
    for rendered in (RDMA, ON):
        on_nodes = [one for one in rendered.groups.values() if one["template"]["spec"].get("hostNetwork")]
        ports = {port["containerPort"] for one in on_nodes for port in containers(one["template"])[0]["ports"]}
        assert ports and 9100 not in ports


def test_some_pools_can_be_colocated_and_others_not() -> None:
    assert ON.groups.keys() == {"prefill", "spare", "colocated"}
    assert slots(ON.groups["colocated"]) == {"tandem-decode": 4, "tandem-near": 1}


def test_several_workers_of_a_pool_in_a_pod_take_free_ports() -> None:
    settings = MIXED.applications["all"]["args"]["settings"]
    assert (settings["worker"]["port"], settings["worker"]["metrics_port"]) == (0, 0)
    assert MIXED.groups["all"]["replicas"] == 2 and slots(MIXED.groups["all"]) == {"tandem-all": 2}
    assert [port["name"] for port in worker(MIXED, "all")["ports"]] == ["serve"]
    assert settings["engine"]["num_threads"] == 2, "four cores for two workers"


@pytest.mark.parametrize(("cpu", "threads"), [("6", 6), (3, 3), ("2500m", 2), ("500m", 1), (1.5, 1)])
def test_a_worker_computes_with_the_cores_of_its_pod(cpu: Any, threads: int) -> None:
    rendered = render({"poolDefaults": {"resources": {"limits": {"cpu": cpu}, "requests": {"cpu": "100m"}}}})
    assert rendered.applications["decode"]["args"]["settings"]["engine"]["num_threads"] == threads


def test_ranks_are_as_many_as_gpus() -> None:
    arguments = {pool: one["args"] for pool, one in RDMA.applications.items()}
    assert {pool: args["settings"]["engine"]["tensor_parallel"] for pool, args in arguments.items()} == {
        "prefill": 4,
        "decode": 8,
    }
    assert {args["num_gpus"] for args in arguments.values()} == {1}, "of a rank"
    assert {args["settings"]["model"]["device"] for args in arguments.values()} == {"cuda"}
    assert {one["args"]["settings"]["model"]["device"] for one in TRIAL.applications.values()} == {"cpu"}
    assert worker(RDMA, "decode")["image"] == "tandem-worker:0.1.0-cuda"
    assert worker(TRIAL, "decode")["image"] == "tandem-worker:0.1.0"


def test_a_worker_may_have_several_pods() -> None:
    values = {
        "pools": {
            "prefill": {"gpus": 8},
            "decode": {"gpus": 16, "podsPerWorker": 2, "replicas": 3, "maxReplicas": 4, "surgePods": 2},
        }
    }
    rendered = render(values)
    args = rendered.applications["decode"]["args"]
    assert args["settings"]["engine"] == {"tensor_parallel": 16, "nnodes": 2}
    assert args["resources"] == {"tandem-decode": 1} and args["num_gpus"] == 1
    group = rendered.groups["decode"]
    assert slots(group) == {"tandem-decode": 1}, "of each pod of a worker"
    assert (group["rayStartParams"]["num-cpus"], group["rayStartParams"]["num-gpus"]) == ("8", "8")
    assert worker(rendered, "decode")["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (6, 6, 10)
    assert "nnodes" not in rendered.applications["prefill"]["args"]["settings"]["engine"]


def test_rdma_takes_devices_and_ucx_variables() -> None:
    prefill, decode = worker(RDMA, "prefill"), worker(RDMA, "decode")
    assert prefill["resources"]["limits"]["rdma/hca_shared_devices_a"] == 4
    assert decode["resources"]["limits"]["rdma/hca_shared_devices_a"] == 8
    assert env(prefill)["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1" and "tcp" not in env(prefill)["UCX_TLS"]
    pods = {pool: RDMA.groups[pool]["template"]["spec"] for pool in ("prefill", "decode")}
    assert "hostNetwork" not in pods["prefill"]
    assert (pods["decode"]["hostNetwork"], pods["decode"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert env(worker(TRIAL, "decode"))["UCX_TLS"] == "tcp", "containers of two pods share no memory"


@EACH
def test_memory_holds_what_is_shared_in_it(name: str) -> None:
    for group in ci(name).groups.values():
        (volume,) = [v["emptyDir"] for v in group["template"]["spec"]["volumes"] if v["name"] == "shm"]
        (container,) = group["template"]["spec"]["containers"]
        assert volume["medium"] == "Memory"
        sizes = [
            int(size.removesuffix("Gi")) for size in (volume["sizeLimit"], container["resources"]["limits"]["memory"])
        ]
        assert sizes[0] < sizes[1]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm" and mounts["cache"] == "/cache" and mounts["tmp"] == "/tmp"
        assert mounts["config"] == "/etc/tandem" and mounts["secrets"] == "/etc/tandem-secrets"


@EACH
def test_a_pod_that_ends_drains_its_workers_first(name: str) -> None:
    spec = ci(name).ray
    for group in ci(name).groups.values():
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["bash", "-c", "tandem drain --local --config /etc/tandem/config.yaml"]
        drain_s = ci(name).config["worker"]["drain_s"]
        assert pod["terminationGracePeriodSeconds"] > drain_s + 20
        assert spec["rayClusterDeletionDelaySeconds"] > drain_s


def test_a_longer_drain_is_a_longer_end() -> None:
    rendered = render({"worker": {"drain_s": 900}})
    assert rendered.ray["rayClusterDeletionDelaySeconds"] == 960
    assert rendered.groups["decode"]["template"]["spec"]["terminationGracePeriodSeconds"] == 940
    for application in rendered.applications.values():
        assert application["args"]["settings"]["worker"]["drain_s"] == 900


@EACH
def test_workers_know_where_they_are(name: str) -> None:
    for group in ci(name).groups.values():
        environment = env(group["template"]["spec"]["containers"][0])
        where = {key: value["fieldRef"]["fieldPath"] for key, value in environment.items() if "fieldRef" in value}
        assert where["POD_IP"] == "status.podIP" and where["NODE_NAME"] == "spec.nodeName"
        assert where["TANDEM_WORKER__HOST_LABEL"] == "spec.nodeName"
        literal = {key: value for key, value in environment.items() if isinstance(value, str)}
        resolve([("environment", from_environment(literal))])


def test_zone_and_rack_of_a_pool_can_be_set() -> None:
    environment = env(worker(ON, "prefill"))
    assert (environment["TANDEM_WORKER__ZONE"], environment["TANDEM_WORKER__RACK"]) == ("west", "a1")
    environment = env(worker(TRIAL, "prefill"))
    assert "topology.kubernetes.io/zone" in environment["TANDEM_WORKER__ZONE"]["fieldRef"]["fieldPath"]
    assert "TANDEM_WORKER__RACK" not in environment


def test_a_pool_s_own_pod() -> None:
    template = ON.groups["prefill"]["template"]
    pod = template["spec"]
    assert pod["nodeSelector"] == {"gpu": "h100"} and pod["runtimeClassName"] == "nvidia"
    assert pod["priorityClassName"] == "high" and "podAntiAffinity" in pod["affinity"] and pod["tolerations"]
    assert template["metadata"]["labels"]["tier"] == "gpu" and template["metadata"]["annotations"]
    assert env(worker(ON, "prefill"))["NCCL_DEBUG"] == "WARN"
    bare = TRIAL.groups["prefill"]["template"]["spec"]
    assert {"nodeSelector", "tolerations", "affinity", "runtimeClassName", "hostNetwork"}.isdisjoint(bare)


def test_false_in_a_pool_overrides_true_in_the_defaults() -> None:
    defaults = {"gpus": 1, "hostNetwork": True, "colocate": True, "ucx": {"UCX_TLS": "rc"}}
    own = {"gpus": 0, "hostNetwork": False, "colocate": False}
    rendered = render({"poolDefaults": defaults, "pools": {"prefill": own, "decode": own}})
    assert rendered.groups.keys() == {"prefill", "decode"}
    assert not any("hostNetwork" in group["template"]["spec"] for group in rendered.groups.values())
    assert env(worker(rendered, "prefill"))["UCX_TLS"] == "rc"


def test_the_head_has_no_workers_and_the_planner_s_policy() -> None:
    group = head(RDMA)
    assert (group["rayStartParams"]["num-cpus"], group["rayStartParams"]["num-gpus"]) == ("0", "0")
    (container,) = group["template"]["spec"]["containers"]
    assert "TANDEM_REDIS__URL" in env(container)
    assert {"mountPath": "/etc/tandem", "name": "config", "readOnly": True} in container["volumeMounts"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert head(ON)["template"]["metadata"]["labels"]["tier"] == "ray"
    assert env(head(ON)["template"]["spec"]["containers"][0])["RAY_LOG_TO_STDERR"] == "1"


@EACH
def test_the_planner_s_target_moves_pools_of_one_role(name: str) -> None:
    planner = ci(name).config["planner"]
    is_planned = ci(name).has("planner-deployment") and planner["mode"] == "act"
    for application in ci(name).applications.values():
        (deployment,) = application["deployments"]
        role = application["args"]["settings"]["worker"]["pool"]
        assert ("autoscaling_config" in deployment) is (is_planned and role != "mixed")
        assert ("num_replicas" in deployment) is ("autoscaling_config" not in deployment)
        if "autoscaling_config" in deployment:
            policy = deployment["autoscaling_config"]["policy"]
            assert policy["policy_function"] == "tandem.planner.serve_policy:replicas"
            assert policy["policy_kwargs"] == {"config": "/etc/tandem/config.yaml", "role": role}


def test_ray_s_autoscaler_is_there_or_not() -> None:
    cluster = ON.ray["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 120
    assert "serviceAccountName" not in head(ON)["template"]["spec"], "KubeRay makes one for it"
    cluster = OFF.ray["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is False and "autoscalerOptions" not in cluster
    assert "serviceAccountName" in head(OFF)["template"]["spec"]


def test_ray_s_state_is_in_redis_where_fault_tolerance_is_on() -> None:
    assert "gcsFaultToleranceOptions" not in TRIAL.ray["rayClusterConfig"]
    state = ON.ray["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert state["redisAddress"] == "serving-redis:6379"
    assert state["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "serving-redis", "key": "password"}
    state = RDMA.ray["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert state["redisAddress"] == "rediss://redis.stores:6380"
    assert state["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "tandem-redis"
    environment = env(head(RDMA)["template"]["spec"]["containers"][0])
    assert environment["RAY_REDIS_CA_CERT"] == "/etc/tandem-redis/ca.crt"
    # KubeRay refuses a head that has these itself.
    assert not environment.keys() & {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"}


def test_redis_may_be_at_an_ipv6_address() -> None:
    external = {"addresses": ["[fd00::1]:6380"], "tls": {"enabled": False}}
    values = {"redis": {"mode": "external", "external": external}, "ray": {"gcsFaultTolerance": {"enabled": True}}}
    rendered = render(values)
    state = rendered.ray["rayClusterConfig"]["gcsFaultToleranceOptions"]
    environment = env(head(rendered)["template"]["spec"]["containers"][0])
    assert (
        state["redisAddress"] == "redis://[fd00::1]:6380"
        and environment["TANDEM_REDIS__URL"] == "redis://[fd00::1]:6380/0"
    )


def test_ray_requires_a_token_unless_that_is_off() -> None:
    assert TRIAL.ray["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert "authOptions" not in OFF.ray["rayClusterConfig"]
    assert (TRIAL.ray["upgradeStrategy"], OFF.ray["upgradeStrategy"]) == ({"type": "NewCluster"}, {"type": "None"})


def test_an_incremental_upgrade_begins_with_no_pod_of_the_second_cluster() -> None:
    """KubeRay starts that cluster with `minReplicas` of each group, whatever its `replicas` are."""
    rendered = ci("incremental-upgrade")
    assert rendered.ray["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {
            "gatewayClassName": "istio",
            "maxSurgePercent": 25,
            "stepSizePercent": 25,
            "intervalSeconds": 30,
        },
    }
    assert {name: (group["minReplicas"], group["replicas"]) for name, group in rendered.groups.items()} == {
        "prefill": (0, 4),
        "decode": (0, 8),
    }
    assert "clusterUpgradeOptions" not in TRIAL.ray["upgradeStrategy"]


@pytest.mark.parametrize("percent", [10, 25, 34, 50, 100])
def test_the_surge_is_at_most_the_documented_one(percent: int) -> None:
    """KubeRay's rule (reconcileServeTargetCapacity): above 100 % in total the first cluster shrinks, else the second
    one grows, by `maxSurgePercent`. Serve's function says how many workers that is."""
    from ray.serve._private.utils import get_capacity_adjusted_num_replicas as workers

    for replicas in range(1, 33):
        first, second, most = 100, 0, replicas
        while first or second < 100:
            if first + second > 100:
                first = max(0, first - percent)
            else:
                second = min(100, second + percent)
            most = max(most, workers(replicas, first) + workers(replicas, second))
        assert most - replicas <= math.ceil(replicas * percent / 100)


@EACH
def test_kuberay_s_labels_are_left_to_it(name: str) -> None:
    """Its services find pods by them."""
    groups = [head(ci(name)), *ci(name).groups.values()]
    for group in groups:
        labels = group["template"]["metadata"]["labels"]
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels.keys()
        assert not [label for label in labels if label.startswith("ray.io/")]
        (container,) = group["template"]["spec"]["containers"]
        assert not {"command", "args", "livenessProbe", "readinessProbe"} & container.keys()


def test_the_model_cache_is_of_each_pod_or_of_all() -> None:
    def cache(rendered: Rendered) -> Object:
        volumes = rendered.groups["prefill" if "prefill" in rendered.groups else "colocated"]["template"]["spec"][
            "volumes"
        ]
        return next(volume for volume in volumes if volume["name"] == "cache")

    assert cache(TRIAL)["emptyDir"] == {"sizeLimit": "20Gi"} and not TRIAL.has("cache-pvc")
    claim = NVLINK.one("cache-pvc")
    assert cache(NVLINK)["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "200Gi"
    assert (claim["spec"]["storageClassName"], claim["spec"]["accessModes"]) == ("shared", ["ReadWriteMany"])
    assert cache(RDMA)["persistentVolumeClaim"]["claimName"] == "models" and not RDMA.has("cache-pvc")


@EACH
def test_the_head_is_not_bound_to_where_the_model_cache_is(name: str) -> None:
    pod = head(ci(name))["template"]["spec"]
    assert "cache" not in {volume["name"] for volume in pod["volumes"]}
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_a_model_can_be_fetched_before_ray_starts() -> None:
    pod = RDMA.groups["decode"]["template"]["spec"]
    (fetch,) = pod["initContainers"]
    assert env(fetch)["MODEL"] == "meta-llama/Llama-3.3-70B-Instruct"
    assert env(fetch)["HF_TOKEN"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert env(worker(RDMA, "decode"))["HF_TOKEN"]["secretKeyRef"]["name"] == "hub"
    assert {"name": "cache", "mountPath": "/cache"} in fetch["volumeMounts"]
    assert fetch["image"] == worker(RDMA, "decode")["image"]
    assert "initContainers" not in TRIAL.groups["decode"]["template"]["spec"]
    assert "HF_TOKEN" not in env(worker(TRIAL, "decode"))


def test_what_fetches_a_model_has_its_pool_s_variables() -> None:
    """The hub may be behind a proxy, or elsewhere."""
    (fetch,) = ON.groups["prefill"]["template"]["spec"]["initContainers"]
    assert env(fetch)["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG" not in env(ON.groups["spare"]["template"]["spec"]["initContainers"][0])


def test_what_fetches_a_model_is_a_program_that_runs(tmp_path: Any) -> None:
    (fetch,) = RDMA.groups["decode"]["template"]["spec"]["initContainers"]
    python, *arguments = fetch["command"]
    environment = {**os.environ, "MODEL": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (python, done.returncode) == ("python", 0), done.stderr
    assert re.search(re.escape(str(tmp_path)), done.stdout)


def test_containers_of_the_head_and_of_workers_have_the_names_that_kuberay_looks_for() -> None:
    assert [one["name"] for one in containers(head(TRIAL)["template"])] == ["ray-head"]
    ports = {port["name"]: port["containerPort"] for port in head(TRIAL)["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000, "metrics": 8080}
