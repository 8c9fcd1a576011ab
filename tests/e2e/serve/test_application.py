"""Test the chart's `serveConfigV2` deployed as KubeRay deploys it, with a gateway beside it: its workers serve, scale,
are replaced and drain, and Serve reports errors in it.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.clock import wall_ns
from tandem.core.ids import PlannerId, WorkerRef
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.replica_targets import ReplicaTargets, TargetRecord
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry
from tandem.worker.run_file import read_run_files
from tests.chart.release import render
from tests.e2e.gateway.http import LONG_ANSWER, Post, completion, send
from tests.e2e.gateway.processes import Cluster, Gateway, cluster
from tests.e2e.gateway.tiny_model import make_model
from tests.e2e.serve.head import Head
from tests.e2e.serve.served import until
from tests.scrape import Scrape

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
NAMESPACE = "document"
APPLICATIONS = ("tandem-prefill", "tandem-decode")
HELD = 'tandem_held_requests{gen_ai_request_model="tiny"}'
VALUES: dict[str, Any] = {
    "worker": {"drain_s": 60},
    "planner": {"enabled": True, "mode": "act"},
    "gateway": {"wake_timeout_s": 240},
    "pools": {"prefill": {"minReplicas": 0, "maxReplicas": 2}, "decode": {"minReplicas": 0, "maxReplicas": 2}},
}


@dataclass(slots=True)
class Pod:
    """Own a one-node Ray with a pod's environment, and a gateway. `config` is the file mounted there."""

    head: Head
    gateway: Gateway
    directory: Path
    redis_url: str

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def deploy(self, rack: str = "r1", others: Sequence[Any] = (), target_capacity: int | None = None) -> None:
        """Deploy the chart's document with the test's model and secret, and `others` beside its applications. Both
        pools share a node here, so each has its own ports. KubeRay sets `target_capacity`, in percent, in an
        incremental upgrade; None is what other strategies send.
        """
        document = render(VALUES).serve
        for application in document["applications"]:
            settings = application["args"]["settings"]
            settings["model"] |= {"id": str(self.directory / "model"), "served_name": "tiny"}
            settings["engine"] |= {"num_threads": 1, "kv_cache_memory": "32MiB"}
            settings["worker"] |= {"port": 0, "metrics_port": 0}
            settings["cluster"]["secret_file"] = str(self.directory / "secret")
            settings["redis"]["namespace"] = NAMESPACE
            (deployment,) = application["deployments"]
            deployment["autoscaling_config"]["policy"]["policy_kwargs"]["config"] = str(self.config)
        by_name = {one["name"]: one for one in document["applications"]}
        by_name["tandem-prefill"]["args"]["settings"]["worker"]["rack"] = rack
        applications = [*document["applications"], *others]
        self.head.deploy(document | {"applications": applications, "target_capacity": target_capacity})

    def records(self) -> dict[str, list[WorkerRecord]]:
        """Return the registry records of each pool that has one."""
        found: dict[str, list[WorkerRecord]] = {}
        for record in asyncio.run(_registered(self.redis_url)):
            found.setdefault(record.pool, []).append(record)
        return found

    def complete(self, salt: int) -> tuple[str, str]:
        """Return the answer and its path."""
        answer = send(self.gateway.url, completion(24, salt, 8))
        assert answer.status == 200, answer.json()
        return answer.text(), answer.path

    def wait_remote(self) -> None:
        until(lambda: self.complete(1)[1] == "remote", PATIENCE_S, lambda: self.gateway.log)

    def wait_workers(self, num_prefill: int, num_decode: int) -> None:
        """Wait until the gateway has exactly these numbers of workers."""
        expected_counts = {"prefill": num_prefill, "decode": num_decode}

        def counts_match() -> bool:
            metrics = self.gateway.metrics()
            return all(
                metrics.get(f'tandem_live_workers{{pool="{pool}"}}', 0) == n for pool, n in expected_counts.items()
            )

        until(counts_match, PATIENCE_S, lambda: self.gateway.log)


async def _registered(redis_url: str) -> tuple[WorkerRecord, ...]:
    """Return all records. Redis is asked again where it does not answer in time, as on a busy machine."""
    registry = WorkerRegistry(redis_url, NAMESPACE)
    end = time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                return await registry.list()
            except StoreUnavailable:
                if time.monotonic() > end:
                    raise
    finally:
        await registry.close()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    model = make_model(directory / "model")
    secret = directory / "secret"
    secret.write_text("0123456789abcdef" * 4)
    (directory / "config.yaml").write_text(
        f"model: {{id: {model}, served_name: tiny}}\nengine: {{num_threads: 1, kv_cache_memory: 32MiB}}\n"
        f"worker: {{drain_s: 60}}\nredis: {{namespace: {NAMESPACE}}}\n"
    )
    environment = {
        "TANDEM_REDIS__URL": redis_url,
        "TANDEM_CLUSTER__SECRET_FILE": str(secret),
        "TANDEM_WORKER__RUN_DIR": str(directory / "run"),
        "TANDEM_WORKER__HOST_LABEL": "node-7",
        "POD_IP": "127.0.0.2",
    }
    own = ("--namespace", NAMESPACE, "--secret-file", str(secret))
    resources = json.dumps({"tandem-prefill": 2, "tandem-decode": 2})
    with Head(directory, resources, environment) as head, cluster(directory, redis_url, model, *own) as programs:
        pod = Pod(head, _gateway(programs), directory, redis_url)
        pod.deploy()
        head.wait_running(*APPLICATIONS)
        pod.wait_workers(1, 1)
        pod.wait_remote()
        yield pod


def _gateway(programs: Cluster) -> Gateway:
    gateway = programs.gateway(
        "gateway",
        *("--routing-policy", "least_loaded"),  # two requests go to two workers
        *("--wake-timeout-s", "240"),
    )
    gateway.wait_ready()
    return gateway


def test_workers_of_a_document_serve_and_advertise_their_place(pod: Pod) -> None:
    found = {role: record for role, (record,) in pod.records().items()}
    assert found.keys() == {"prefill", "decode"}
    for record in found.values():
        assert re.fullmatch(rf"{socket.gethostname()}-\w+", record.worker.id)
        assert record.worker.address.startswith("127.0.0.2:") and not record.worker.address.endswith(":0")
        assert record.topology.host == "node-7"
    assert (found["prefill"].topology.rack, found["decode"].topology.rack) == ("r1", "")
    assert {record.worker for record in found.values()} == set(read_run_files(pod.run_dir))


def test_the_proxies_answer_the_probes_of_kuberay(pod: Pod) -> None:
    assert httpx.get(f"{pod.head.proxy}/-/healthz", trust_env=False).text == "success"
    (record,) = pod.records()["decode"]
    answer = httpx.get(f"{pod.head.proxy}/tandem-decode", trust_env=False)
    assert answer.json() == {"worker": record.worker.id, "state": "healthy"}


def application(name: str, **args: Any) -> dict[str, Any]:
    path = "tandem.worker.serve.application:build"
    return {"name": f"tandem-{name}", "route_prefix": f"/tandem-{name}", "import_path": path, "args": args}


def test_serve_reports_a_broken_pool_and_the_others_keep_serving(pod: Pod) -> None:
    before = pod.records()
    nowhere = {"model": {"id": "/nowhere"}, "worker": {"pool": "mixed"}}
    others = [application("wrong", pol="wrong"), application("lost", pool="lost", settings=nowhere)]

    def failures() -> list[str]:
        found = pod.head.applications()
        lost = found["tandem-lost"]["deployments"].get("tandem-lost", {"message": ""})
        return [found["tandem-wrong"]["message"], lost["message"]]

    pod.deploy(others=others)
    until(lambda: all(failures()), PATIENCE_S, lambda: str(pod.head.applications()))
    (wrong, lost) = failures()
    assert "TandemError: args.pol: there is no such key" in wrong
    assert "TandemError: model.id='/nowhere'" in lost
    assert pod.records() == before
    pod.deploy()
    until(lambda: pod.head.applications().keys() == set(APPLICATIONS), PATIENCE_S)


def test_a_pool_scales_to_the_planners_target(pod: Pod) -> None:
    expected = pod.complete(2)[0]
    (first,) = pod.records()["decode"]
    asyncio.run(_set_target(pod.redis_url, {"prefill": 1, "decode": 2}))
    pod.wait_workers(1, 2)
    assert first in pod.records()["decode"], "what ran goes on"
    assert pod.complete(2)[0] == expected
    asyncio.run(_set_target(pod.redis_url, {"prefill": 1, "decode": 1}))
    pod.wait_workers(1, 1)
    pod.head.wait_running(*APPLICATIONS)
    pod.wait_remote()
    assert pod.complete(2)[0] == expected


def test_a_cluster_that_an_upgrade_shrinks_keeps_its_streams(pod: Pod) -> None:
    """KubeRay lowers `target_capacity` of the old cluster step by step; two workers at 50 % are one."""
    asyncio.run(_set_target(pod.redis_url, {"prefill": 1, "decode": 2}))
    pod.wait_workers(1, 2)
    bodies = [completion(24, salt, LONG_ANSWER, stream=True) for salt in (4, 5)]
    with Post(pod.gateway.url, bodies[0]) as first:
        first.wait_events(3)
        until(lambda: sorted(_num_running(pod)) == [0, 1], PATIENCE_S)
        with Post(pod.gateway.url, bodies[1]) as second:
            second.wait_events(3)
            until(lambda: _num_running(pod) == [1, 1], PATIENCE_S)
            pod.deploy(target_capacity=50)
            pod.wait_workers(1, 1)
            with ThreadPoolExecutor() as readers:  # the gateway cuts off a client that does not read
                answers = list(readers.map(Post.finish, (first, second)))
    assert [answer.error() for answer in answers] == [None, None]
    assert [_finish_reason(answer.events()) for answer in answers] == ["length", "length"]
    asyncio.run(_set_target(pod.redis_url, {"prefill": 1, "decode": 1}))
    pod.deploy()
    pod.head.wait_running(*APPLICATIONS)
    pod.wait_workers(1, 1)
    pod.wait_remote()


def _num_running(pod: Pod) -> list[float]:
    """Return the sequences that run on each decode worker."""
    targets = httpx.get(f"{pod.gateway.url}/metrics/targets", trust_env=False).json()
    addresses = [address for one in targets if one["labels"]["pool"] == "decode" for address in one["targets"]]
    return [Scrape.of(address).sum("vllm:num_requests_running") for address in addresses]


def test_both_pools_lose_all_workers_and_a_held_request_is_answered_by_new_ones(pod: Pod) -> None:
    expected = pod.complete(2)[0]
    asyncio.run(_set_target(pod.redis_url, {"prefill": 0, "decode": 0}))
    pod.wait_workers(0, 0)
    pod.head.wait_running(*APPLICATIONS)
    assert pod.gateway.missing() is None
    with Post(pod.gateway.url, completion(24, 2, 8)) as post:
        until(lambda: pod.gateway.metrics().get(HELD) == 1, PATIENCE_S, lambda: pod.gateway.log)
        asyncio.run(_set_target(pod.redis_url, {"prefill": 1, "decode": 1}))
        pod.wait_workers(1, 1)
        answer = post.finish()
    assert answer.status == 200 and answer.text() == expected and answer.path.endswith(";held")
    pod.wait_remote()


async def _set_target(redis_url: str, replicas: dict[str, int]) -> None:
    targets = ReplicaTargets(redis_url, NAMESPACE)
    try:
        planner = PlannerId("test")
        assert await targets.publish(TargetRecord(model="tiny", planner=planner, replicas=replicas)) == planner
    finally:
        await targets.close()


def test_a_pool_of_one_gets_its_next_worker_before_it_loses_the_last(pod: Pod) -> None:
    (before,) = pod.records()["prefill"]
    seen: list[set[WorkerRef]] = []
    looks_ns: list[int] = []

    def replaced() -> bool:
        looks_ns.append(wall_ns())
        seen.append({record.worker for record in pod.records().get("prefill", ())})
        return before.worker not in seen[-1]

    pod.deploy(rack="r2")
    until(replaced, PATIENCE_S)
    assert all(seen), "there always was one"
    (after,) = pod.records()["prefill"]
    # Both may be there for less than the time between two looks.
    assert after.topology.rack == "r2" and after.worker.incarnation < looks_ns[-2], "the next one started before"
    pod.head.wait_running(*APPLICATIONS)
    pod.wait_workers(1, 1)
    pod.wait_remote()


def test_local_workers_drain_while_a_stream_runs_to_its_end(pod: Pod) -> None:
    """Run as the last test, because no worker serves after it."""
    with Post(pod.gateway.url, completion(24, 3, LONG_ANSWER, stream=True)) as post:
        post.wait_events(3)
        drain = _tandem(pod, "drain", "--local", "--config", str(pod.config), "--timeout", "600")
        until(lambda: _drains_and_runs(pod, "decode"), PATIENCE_S)
        answer = post.finish()
    output = drain()
    assert answer.error() is None
    assert _finish_reason(answer.events()) == "length"
    ids = sorted(worker.id for worker in read_run_files(pod.run_dir))
    assert sorted(output.splitlines()) == [
        f"{worker} accepts no new jobs; no jobs and leases are left" for worker in ids
    ]
    assert len(ids) == 2


def _finish_reason(events: Sequence[Any]) -> Any:
    return next(event["choices"][0]["finish_reason"] for event in events[::-1] if _ends(event))


def _ends(event: Any) -> bool:
    return bool(event and event["choices"] and event["choices"][0]["finish_reason"])


def _drains_and_runs(pod: Pod, pool: str) -> bool:
    """Return whether the pool's worker drains and runs one request, by its metrics at the gateway's target address."""
    targets = httpx.get(f"{pod.gateway.url}/metrics/targets", trust_env=False).json()
    (address,) = (target for one in targets if one["labels"]["pool"] == pool for target in one["targets"])
    seen = Scrape.of(address)
    return seen.sum("tandem_worker_draining") == seen.sum("vllm:num_requests_running") == 1


def _tandem(pod: Pod, *arguments: str) -> Callable[[], str]:
    """Return the command's output in the pod after a successful end."""
    environment = {
        "TANDEM_CLUSTER__SECRET_FILE": str(pod.directory / "secret"),
        "TANDEM_WORKER__RUN_DIR": str(pod.run_dir),
        "PYTHONPATH": ":".join(sys.path),
    }
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end() -> str:
        output = started.communicate(timeout=PATIENCE_S)[0]
        assert started.returncode == 0, output
        return output

    return end
