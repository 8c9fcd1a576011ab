"""Test workers on hosts with two network devices each, one of which is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path

import pytest

from tests.e2e.gateway.http import completion
from tests.e2e.gateway.processes import Gateway, until
from tests.e2e.gateway.tiny_model import make_model
from tests.hosts.cluster import complete, empty_hosts, text_of
from tests.hosts.conftest import SETTINGS
from tests.hosts.network import Network, NoNamespaces

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]
NUM_REQUESTS = 4
NUM_PROMPT_TOKENS = 2000
LEAST_TOKEN_BYTES = 100
"""Less than the KV of one token of the tiny model."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Gateway, Gateway, Network]]:
    """Yield a gateway that splits requests, one that does not, and the host of the decode worker."""
    names, model = ("data", "gate", "a", "b"), make_model(tmp_path / "tiny")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(empty_hosts(tmp_path, model, names, *SETTINGS, with_two=("a", "b")))
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        network, programs, flags = hosts
        gate = network["gate"]
        listen = ("--host", gate.address, *flags)
        gateway = programs.gateway("gateway", *listen, within=gate.within)
        whole = programs.gateway("whole", *listen, "--disaggregation", "off", within=gate.within)
        for name, pool in (("a", "prefill"), ("b", "decode")):
            host = network[name]
            devices = ",".join(reversed(host.devices))
            own = ("--worker-host", host.address, "--transfer-network-devices", devices)
            programs.worker(f"w{name}", pool, *own, *flags, within=host.within)
        programs.wait_serving()
        yield gateway, whole, network["b"]


def paths(gateway: Gateway, whole: Gateway, salts: Iterable[int]) -> list[str]:
    """Complete prompts at the same time, check that the texts are those without a split, and return the paths."""
    bodies = [completion(NUM_PROMPT_TOKENS, salt, 8) for salt in salts]
    with ThreadPoolExecutor(NUM_REQUESTS) as senders:
        replies = list(senders.map(lambda body: complete(gateway, body), bodies))
    assert [text_of(reply) for reply in replies] == [text_of(complete(whole, body)) for body in bodies]
    return [str(reply["path"]) for reply in replies]


def test_kv_moves_over_the_named_devices_and_over_one_when_the_other_is_lost(
    served: tuple[Gateway, Gateway, Network],
) -> None:
    gateway, whole, host = served
    salts = count()
    second = host.devices[1]
    before = host.received_bytes(second)
    assert paths(gateway, whole, islice(salts, NUM_REQUESTS)) == ["remote"] * NUM_REQUESTS
    moved_bytes = host.received_bytes(second) - before
    assert moved_bytes > NUM_REQUESTS * NUM_PROMPT_TOKENS * LEAST_TOKEN_BYTES
    host.unplug_second()
    until(
        lambda: paths(gateway, whole, islice(salts, NUM_REQUESTS)) == ["remote"] * NUM_REQUESTS,
        "hand-offs over the other device",
        patience_s=120,
    )
