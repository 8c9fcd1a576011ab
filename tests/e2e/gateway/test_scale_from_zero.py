"""Test real gateways, workers and a planner around pools that sleep: requests wait for a first worker, and wake it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tandem.core.ids import ServeId
from tandem.stores.replica_targets import ReplicaTargets
from tests.e2e.cluster import Program
from tests.e2e.gateway.http import Post, completion
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import PATIENCE_S, Cluster, Gateway, Worker, cluster, redis_server, until
from tests.e2e.gateway.test_partial_loss import NO_WAIT, complete, path_of, probe, shortages

ONE, ZERO = {"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0}
PLANNER = (
    *("planner", "--mode", "act", "--planner-model", "tiny", "--min-prefill", "0", "--min-decode", "0"),
    *("--idle-s", "2", "--interval-s", "0.5", "--no-change-roles"),
)


class Serve:
    """Stand for Ray Serve, which runs as many workers as the planner's target says.

    `is_stuck`: it reports its present number and does not follow the target, as while a cluster has no free node.
    """

    def __init__(self, redis_url: str, running: Cluster) -> None:
        self.is_stuck = False
        self._redis_url = redis_url
        self._running = running
        self._workers: dict[str, list[Worker]] = {"prefill": [], "decode": []}
        self._num_started = 0

    def step(self) -> Mapping[str, int]:
        """Follow the target once, and return it; empty while there is none."""
        target = asyncio.run(self._target())
        if target and not self.is_stuck:
            self.scale(target)
        asyncio.run(self._report())
        return target

    def scale(self, numbers: Mapping[str, int]) -> None:
        for role, workers in self._workers.items():
            while len(workers) > numbers[role]:
                workers.pop().stop()
            while len(workers) < numbers[role]:
                self._num_started += 1
                workers.append(self._running.worker(f"{role}-{self._num_started}", role))

    async def _target(self) -> Mapping[str, int]:
        targets = ReplicaTargets(self._redis_url, "tandem")
        record = await targets.read("tiny")
        await targets.close()
        return {} if record is None else record.replicas

    async def _report(self) -> None:
        targets = ReplicaTargets(self._redis_url, "tandem")
        for role, workers in self._workers.items():
            await targets.publish_deployed("tiny", role, ServeId("s"), len(workers))
        await targets.close()


@pytest.fixture
def running(tmp_path: Path, model: Path) -> Iterator[tuple[Serve, Cluster]]:
    with redis_server() as redis, cluster(tmp_path, redis.url, model, *SETTINGS, *NO_WAIT) as programs:
        serve = Serve(redis.url, programs)
        serve.scale(ONE)
        planner = Program(tmp_path, "planner", *PLANNER, "--redis-url", redis.url)
        try:
            yield serve, programs
        finally:
            planner.stop()


def num_held(gateway: Gateway) -> float:
    return gateway.metrics().get('tandem_held_requests{gen_ai_request_model="tiny"}', 0)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_pools_sleep_and_a_request_wakes_them(running: tuple[Serve, Cluster]) -> None:
    serve, programs = running
    gateway = programs.gateway("gateway", "--wake-timeout-s", "120")
    gateway.wait_ready()
    until(lambda: serve.step() == ONE, "a planner's target")
    until(lambda: gateway.missing() is None and path_of(gateway, "tiny") == "remote", "a request on two workers")

    until(lambda: serve.step() == ZERO, "a planner that ends all workers")
    asleep = (200, "model tiny has no live worker; the planner starts one for the next request")
    until(lambda: serve.step() == ZERO and probe(gateway, "/ready") == asleep, "a ready gateway without workers")
    assert shortages(gateway) == set()

    # This gateway has not seen a worker, and gives up before one could start.
    serve.is_stuck = True
    late = programs.gateway("late", "--wake-timeout-s", "1")
    late.wait_ready()
    until(lambda: serve.step() == ZERO and probe(late, "/ready") == asleep, "a late gateway that knows the model")
    began = time.monotonic()
    refused = complete(late, "tiny")
    assert time.monotonic() - began >= 1.0
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "no_worker")
    assert "no worker could take the request within 1 s (gateway.wake_timeout_s)" in error["message"]
    assert num_held(late) == 0

    with Post(gateway.url, completion(20, 1, 4)):
        until(lambda: num_held(gateway) == 1, "a held request")
        until(lambda: serve.step() == ONE, "a target that starts workers")
        assert shortages(gateway) == {'{gen_ai_request_model="tiny",lacks="worker"}'}
    until(lambda: num_held(gateway) == 0, "a held request whose client has left")

    with ThreadPoolExecutor() as clients:
        answer = clients.submit(complete, gateway, "tiny")
        until(lambda: num_held(gateway) == 1, "another held request")
        serve.is_stuck = False
        until(lambda: serve.step() and answer.done(), "an answer of a worker that was started for it", 2 * PATIENCE_S)
    served: httpx.Response = answer.result()
    assert served.status_code == 200 and served.headers["x-tandem-path"].endswith(";held")
    assert "requests for model tiny are held until a worker can serve them" in gateway.log
    complaints = [*gateway.complaints(), *late.complaints()]
    assert [line for line in complaints if "ERROR" in line or "Traceback" in line] == []
