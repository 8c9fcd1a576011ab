"""Test what runs before a release is uninstalled: Ray's clusters end before the Redis that holds their state."""

from __future__ import annotations

import runpy
from collections.abc import Iterator

import pytest
from kubernetes import client, config

from tests.chart.release import CHART, ci, containers, render
from tests.unit.planner.kube_server import KubeServer, kube_server

SCRIPT = "files/hooks/delete_rayservice.py"
ON = render({"ray": {"gcsFaultTolerance": {"enabled": True}}})


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    with kube_server() as (server, url):
        settings = client.Configuration(host=url)
        monkeypatch.setattr(config, "load_incluster_config", lambda: client.Configuration.set_default(settings))
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        for name, value in {"RAYSERVICE": "serving", "POD_NAMESPACE": "default", "TIMEOUT_S": "0.2"}.items():
            monkeypatch.setenv(name, value)
        server.put("rayservices", "serving", {"metadata": {"uid": "s1"}})
        for name, owner in (("serving-1", "s1"), ("other-1", "s2")):
            server.put("rayclusters", name, {"metadata": {"ownerReferences": [{"uid": owner}]}})
        yield server
        client.Configuration.set_default(None)


def run_script() -> int:
    status: int = runpy.run_path(str(CHART / SCRIPT))["main"]()
    return status


def test_it_waits_until_the_clusters_of_the_service_are_gone(api: KubeServer) -> None:
    num_looks = 0

    def end_at_the_third_look(method: str, plural: str, who: str) -> None:
        nonlocal num_looks
        num_looks += plural == "rayclusters"
        if num_looks == 3 and "serving-1" in api.names("rayclusters"):
            api.delete("rayclusters", "serving-1")

    api.fault = end_at_the_third_look
    assert run_script() == 0 and num_looks == 3
    assert api.names("rayservices") == [] and api.names("rayclusters") == ["other-1"]


def test_it_fails_where_a_cluster_stays_and_names_the_remedy(
    api: KubeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script() == 1
    problem = capsys.readouterr().err
    assert "serving-1" in problem and "other-1" not in problem and "--no-hooks" in problem


def test_a_service_that_is_gone_is_no_failure(api: KubeServer) -> None:
    api.delete("rayservices", "serving")
    assert run_script() == 0


def test_the_job_may_do_what_its_script_does_and_no_more() -> None:
    objects = [ON.one(f"uninstall-{kind}") for kind in ("serviceaccount", "role", "rolebinding", "job")]
    account, role, binding, job = objects
    annotations = [one["metadata"]["annotations"] for one in objects]
    assert {one["helm.sh/hook"] for one in annotations} == {"pre-delete"}
    weights = [int(one["helm.sh/hook-weight"]) for one in annotations]
    assert max(weights[:3]) < weights[3], "the job is made last"
    assert role["rules"] == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayservices"],
            "resourceNames": [ON.one("rayservice")["metadata"]["name"]],
            "verbs": ["get", "delete"],
        },
        {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["list"]},
    ]
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    (container,) = containers(job["spec"]["template"])
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["RAYSERVICE"] == ON.one("rayservice")["metadata"]["name"]
    assert float(environment["TIMEOUT_S"]) < job["spec"]["activeDeadlineSeconds"] < 300, "Helm waits for five minutes"


@pytest.mark.parametrize("name", ["cpu-trial", "rdma"])
def test_without_ray_state_in_our_own_redis_there_is_no_job(name: str) -> None:
    assert not any(ci(name).has(template) for template in ("uninstall-job", "uninstall-role"))
