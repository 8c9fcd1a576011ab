"""Test workers that Ray Serve places on several hosts, joined by `ray start` as docs/operations.md says."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.cluster import spawn
from tests.e2e.gateway.http import completion
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, cluster
from tests.e2e.gateway.tiny_model import make_model
from tests.e2e.serve.head import answers
from tests.e2e.serve.served import kill_tree, until
from tests.hosts.cluster import complete, reasons_of, redis_on, text_of
from tests.hosts.network import Network, NoNamespaces, networks

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
HOSTS = ("head", "a", "b", "c")
START_S = 180.0
POOLS = {"a": "prefill", "b": "decode", "c": "decode"}
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus", "0")


class RayNode:
    """Own the processes of Ray on one host."""

    def __init__(self, network: Network, log: Path, environment: dict[str, str], *words: str) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "RAY_"))}
        room = ("--num-cpus", "3", "--object-store-memory", str(100 << 20))
        command = (*network.within, *RAY, "--node-ip-address", network.address, *room, *words)
        self._log = log
        with log.open("wb") as output:
            self.process = spawn(*command, env=own | environment, stdout=output, stderr=subprocess.STDOUT)

    def wait_joined(self) -> None:
        """Wait until this host is part of the cluster."""

        def has_joined() -> bool:
            assert self.process.poll() is None, self.text()
            return "Ray runtime started" in self.text()

        until(has_joined, START_S, self.text)

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill everything at once, workers included."""
        kill_tree(self.process)


@dataclass
class RayHosts:
    """A Ray cluster with a prefill worker on `a` and a decode worker on `b` or `c`, and the gateway on `head`."""

    network: dict[str, Network]
    nodes: dict[str, RayNode]
    gateway: Gateway
    api: str
    logs: Path

    def complete(self, salt: int) -> tuple[int, str, dict[str, Any], str]:
        """Return status, path, reasons and text of the answer to a request."""
        reply = complete(self.gateway, completion(300, salt, 24))
        if reply["status"] != 200:
            return reply["status"], "", {}, str(reply)
        return 200, reply["path"], reasons_of(reply), text_of(reply)

    def wait_split(self) -> None:
        """Wait until a request is split."""
        until(lambda: self.complete(0)[1] == "remote", START_S, self.state)

    def state(self) -> str:
        """Return what Serve says of the applications, and the end of the logs."""
        logs = [*self.logs.glob("*.log")]
        ends = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join((httpx.get(self.api, timeout=PATIENCE_S, trust_env=False).text, str(self.complete(0)), *ends))


@contextmanager
def running_ray(
    directory: Path,
    prefill: dict[str, Any] | None = None,
    pools: Mapping[str, str] = MappingProxyType(POOLS),
) -> Iterator[RayHosts]:
    """Start a Ray cluster, with engine settings `prefill` of the prefill worker, and yield it once it serves. `pools`:
    the pool whose workers a host may have. Skips the test where there are no network namespaces."""
    with ExitStack() as stack:
        try:
            network = dict(zip(HOSTS, stack.enter_context(networks(*HOSTS)), strict=True))
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        head = network["head"]
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(32))
        url = stack.enter_context(redis_on(head, directory, 7000))  # Ray itself takes 6379
        environment = {
            "TANDEM_REDIS__URL": url,
            "TANDEM_CLUSTER__SECRET_FILE": str(secret),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        sessions = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        nodes: dict[str, RayNode] = {}

        def start(host: str, *words: str) -> None:
            nodes[host] = RayNode(network[host], directory / f"{host}.log", environment, *words)
            stack.callback(nodes[host].kill)
            nodes[host].wait_joined()  # several that start at once time out on two cores

        dashboard = ("--dashboard-host", head.address, "--dashboard-port", "8265")
        start("head", "--head", "--port", "6379", "--temp-dir", sessions, *dashboard)
        api = f"http://{head.address}:8265/api/serve/applications/"
        until(lambda: answers(api), START_S, nodes["head"].text)
        for host, pool in pools.items():
            start(host, "--address", f"{head.address}:6379", "--resources", f'{{"tandem-{pool}": 1}}')
        model = make_model(directory / "tiny")
        deploy(api, model, prefill or {})
        programs = stack.enter_context(cluster(directory, url, model, "--secret-file", str(secret)))
        gateway = programs.gateway("gateway", "--host", head.address, within=head.within)
        gateway.wait_ready()
        made = RayHosts(network, nodes, gateway, api, directory)
        made.wait_split()
        yield made


@pytest.fixture(scope="module")
def ray_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    with running_ray(tmp_path_factory.mktemp("ray")) as made:
        yield made


def deploy(api: str, model: Path, prefill: dict[str, Any]) -> None:
    """Deploy the applications of the document with the test's model; `prefill`: engine settings of that pool."""
    document = yaml.safe_load((ROOT / "deploy/ray/applications.yaml").read_text())
    for application in document["applications"]:
        settings = application["args"]["settings"]
        settings["model"] = {"id": str(model), "served_name": "tiny", "dtype": "float64"}
        settings["engine"] = {"num_threads": 1, "kv_cache_memory": "32MiB"}
        if application["args"]["pool"] == "prefill":
            settings["engine"] |= prefill
        settings["transfer"] = {"backend": "tcp"}
    answer = httpx.put(api, json=document, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def test_ray_s_workers_on_two_hosts_share_a_request(ray_hosts: RayHosts) -> None:
    replies = [ray_hosts.complete(salt) for salt in range(1, 9)]
    assert {reply[:2] for reply in replies} == {(200, "remote")}
    assert all(reply[3] for reply in replies)


def test_the_worker_of_a_lost_host_is_started_on_another(ray_hosts: RayHosts) -> None:
    expected = [ray_hosts.complete(salt)[3] for salt in range(1, 5)]
    used = used_host(ray_hosts)
    ray_hosts.network[used].unplug()
    ray_hosts.nodes[used].kill()
    statuses = [ray_hosts.complete(salt)[0] for salt in range(20, 28)]
    assert statuses == [200] * 8, "the prefill worker can answer alone"
    ray_hosts.wait_split()
    assert used_host(ray_hosts) != used
    assert [ray_hosts.complete(salt)[3] for salt in range(1, 5)] == expected


def used_host(ray_hosts: RayHosts) -> str:
    """Return the host of the decode worker."""
    found = httpx.get(ray_hosts.api, timeout=PATIENCE_S, trust_env=False).json()
    details = found["applications"]["tandem-decode"]["deployments"]["tandem-decode"]
    (address,) = {each["node_ip"] for each in details["replicas"] if each["state"] == "RUNNING"}
    return next(host for host, network in ray_hosts.network.items() if network.address == address)
