"""A prefill and a decode worker in networks of their own, KV over TCP between them, and links that are really cut:
requests under way go on with the same tokens; never over a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.world import SETTINGS, live
from tests.e2e.gateway.http import Answer, begin_streams, completion, send
from tests.e2e.gateway.processes import Gateway, Redis, Worker, cluster, until
from tests.hosts.network import Network, NoNamespaces, networks

pytestmark = pytest.mark.timeout(240)
NUM_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Apart:
    """`prefill` and `decode` reach each other and the gateway over links that can be cut."""

    prefill: Worker
    decode: Worker
    gateway: Gateway
    prefill_network: Network
    decode_network: Network

    def request(self, salt: int, max_tokens: int = 200) -> Answer:
        return send(self.gateway.url, completion(300, salt, max_tokens))

    def wait_whole(self) -> None:
        until(lambda: live(self.gateway) == (1, 1), "a gateway that sees both")
        until(lambda: self.request(7, 2).path == "remote", "a request that is split")
        for worker in (self.prefill, self.decode):
            until(worker.is_idle, f"an idle {worker.name}")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, redis: Redis, model: Path) -> Iterator[Apart]:
    with ExitStack() as stack:
        try:
            one, other = stack.enter_context(networks("p", "d"))
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("UCX_TLS", "tcp")
        settings = (*SETTINGS, "--transfer-backend", "nixl", "--namespace", "apart")
        running = stack.enter_context(cluster(tmp_path_factory.mktemp("apart"), redis.url, model, *settings))
        listen = ("--cluster-insecure", "--worker-host")
        prefill = running.worker("p", "prefill", *listen, one.address, within=one.within)
        decode = running.worker("d", "decode", *listen, other.address, within=other.within)
        gateway = running.gateway("gateway")
        running.wait_serving()
        apart = Apart(prefill, decode, gateway, one, other)
        apart.wait_whole()
        yield apart


def test_the_link_of_a_decode_worker_is_cut(apart: Apart) -> None:
    expected = [apart.request(salt).text() for salt in range(NUM_STREAMS)]
    with ExitStack() as stack:
        bodies = [completion(300, salt, 200) for salt in range(NUM_STREAMS)]
        posts = begin_streams(stack, apart.gateway.url, bodies, 5)
        apart.decode_network.unplug()
        try:
            answers = [post.finish() for post in posts]
        finally:
            apart.decode_network.plug_in()
    assert [answer.error() for answer in answers] == [None] * NUM_STREAMS
    assert [answer.text() for answer in answers] == expected
    apart.wait_whole()


@pytest.mark.nightly
def test_two_workers_cannot_reach_each_other(apart: Apart) -> None:
    expected = apart.request(50).text()
    apart.decode_network.blackhole_route_to(apart.prefill_network)
    try:
        answer = apart.request(50)
    finally:
        apart.decode_network.restore_route_to(apart.prefill_network)
    assert answer.error() is None and answer.text() == expected
    apart.wait_whole()
