"""Test two gateways with quotas under load while their Redis is lost: no request fails, the loss is logged, and all
recovers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.contract.stores.redis_servers import TcpServer, tcp_server
from tests.contract.stores.test_loss import FAULTS
from tests.e2e.gateway.http import prompt
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import PATIENCE_S, Cluster, Gateway, Worker, cluster, until
from tests.e2e.gateway.tenants import key_of, tenants_file

pytestmark = [pytest.mark.nightly, pytest.mark.redis, pytest.mark.timeout(240)]

NUM_REQUESTS = 8
"""Number of requests at each gateway while Redis is lost."""


@dataclass
class Load:
    """Run one client of a gateway, which sends requests repeatedly. `statuses` are those of all answers."""

    gateway: Gateway
    salts: Iterator[int]
    statuses: list[int] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx.Client(base_url=self.gateway.url, timeout=PATIENCE_S, trust_env=False) as http:
            while not self.is_over.is_set():
                body = {"model": "tiny", "prompt": prompt(20, next(self.salts)), "max_tokens": 3}
                answer = http.post("/v1/completions", json=body, headers={"x-api-key": key_of("acme")})
                self.statuses.append(answer.status_code)

    def wait_more(self) -> None:
        """Wait for as many further answers as belong to a loss."""
        least = len(self.statuses) + NUM_REQUESTS
        until(lambda: len(self.statuses) >= least, f"{NUM_REQUESTS} answers of {self.gateway.name}")


@dataclass(frozen=True)
class Rig:
    redis: TcpServer
    cluster: Cluster
    workers: tuple[Worker, Worker]
    gateways: tuple[Gateway, Gateway]

    def metric(self, gateway: Gateway, name: str) -> float:
        """Return the sum over all series of a metric."""
        text = httpx.get(gateway.metrics_url, timeout=PATIENCE_S, trust_env=False).text
        rows = (line.rsplit(" ", 1) for line in text.splitlines())
        return sum(float(value) for series, value in rows if series.partition("{")[0] == name)

    def all_up(self) -> bool:
        healthy = [not worker.describe().redis_problem for worker in self.workers]
        return all(healthy) and all(self.metric(gateway, "tandem_redis_up") == 1 for gateway in self.gateways)

    @contextmanager
    def load(self) -> Iterator[list[Load]]:
        salts = itertools.count(9_000_000)
        loads = [Load(gateway, salts) for gateway in self.gateways]
        threads = [threading.Thread(target=load.run) for load in loads]
        for thread in threads:
            thread.start()
        try:
            yield loads
        finally:
            for load in loads:
                load.is_over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("loss")
    tenants = directory / "tenants.yaml"
    tenants.write_text(tenants_file({"acme": "tokens_per_minute: 1000000000, max_concurrency: 100, "}))
    with tcp_server() as redis, cluster(directory, redis.url, model, *SETTINGS) as running:
        workers = running.worker("p", "prefill"), running.worker("d", "decode")
        settings = ("--auth", "keys", "--tenants", str(tenants))
        gateways = running.gateway("one", *settings), running.gateway("two", *settings)
        running.wait_serving()
        yield Rig(redis, running, workers, gateways)
        running.stop()
        assert {program.exit_code for program in running.programs} == {0}
        assert running.log_lines("Traceback", "ERROR") == []


def words(gateway: Gateway) -> list[str]:
    return [line for line in gateway.log.splitlines() if "Redis fails" in line or "Redis answers again" in line]


@pytest.mark.parametrize("name", FAULTS)
def test_no_request_fails_while_redis_is_lost_and_all_heals(rig: Rig, name: str) -> None:
    lose, heal, _ = FAULTS[name]
    until(rig.all_up, "a Redis that all can use")
    before = {gateway.name: len(words(gateway)) for gateway in rig.gateways}
    errors = [rig.metric(gateway, "tandem_redis_errors_total") for gateway in rig.gateways]
    with rig.load() as loads:
        for load in loads:
            load.wait_more()
        lose(rig.redis)
        for load in loads:
            load.wait_more()
            until(lambda gateway=load.gateway: rig.metric(gateway, "tandem_redis_up") == 0, "a word in the metrics")
            load.wait_more()
        for worker in rig.workers:
            until(lambda worker=worker: worker.describe().redis_problem, "a word of a worker")
        heal(rig.redis)
        until(rig.all_up, "a Redis that all can use again")
        for load in loads:
            load.wait_more()
    assert {status for load in loads for status in load.statuses} == {200}
    for gateway, had in zip(rig.gateways, errors, strict=True):
        assert rig.metric(gateway, "tandem_redis_errors_total") > had
        redis_lines = words(gateway)[before[gateway.name] :]
        assert len(redis_lines) == 2 and "Redis fails" in redis_lines[0] and "Redis answers again" in redis_lines[1], (
            redis_lines
        )
    with rig.redis.client() as client:
        until(lambda: client.hlen("tandem:quota:{acme}:open") == 0, "quotas that are settled")
        until(lambda: client.hlen("{tandem:workers}:records") == 2, "both workers in the registry")


def test_a_worker_started_without_redis_is_found_later_and_a_gateway_names_what_it_waits_for(rig: Rig) -> None:
    until(rig.all_up, "a Redis that all can use")
    rig.redis.stop()
    newcomer, late = rig.cluster.worker("new", "decode"), rig.cluster.gateway("late")
    newcomer.wait_ready()
    late.wait_ready()
    until(lambda: "Redis does not answer" in (late.missing() or ""), "what the late gateway waits for")
    rig.redis.start()
    late.wait_serving()
    until(lambda: "new" in late.log, "the newcomer, found")
    assert newcomer.stop() == 0 and late.stop() == 0
