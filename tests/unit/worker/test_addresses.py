"""Test which address a worker advertises, by settings and environment."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from tandem.core.addresses import is_wildcard
from tandem.core.config import ClusterConfig, WorkerConfig
from tandem.core.errors import TandemError
from tandem.wire.gen import worker_pb2 as pb
from tandem.worker.addresses import advertised_address, default_route_address, own_host
from tests.unit.worker.conftest import Nodes

OWN = {"0.0.0.0": "10.0.0.9", "::": "fd00::9"}


@pytest.mark.parametrize(
    ("host", "address", "pod_ip", "expected"),
    [
        ("127.0.0.1", "", "10.1.2.3", "127.0.0.1:7"),
        ("worker.local", "", "10.1.2.3", "worker.local:7"),
        ("::1", "", "", "[::1]:7"),
        ("0.0.0.0", "", "10.1.2.3", "10.1.2.3:7"),
        ("0.0.0.0", "", "", "10.0.0.9:7"),
        ("::", "", "fd00::1", "[fd00::1]:7"),
        ("::", "", "", "[fd00::9]:7"),
        ("0.0.0.0", "proxy:443", "10.1.2.3", "proxy:443"),
        ("0.0.0.0", "proxy:0", "10.1.2.3", "proxy:7"),
        ("0.0.0.0", "[fd00::2]:0", "", "[fd00::2]:7"),
    ],
)
def test_the_advertised_address(host: str, address: str, pod_ip: str, expected: str) -> None:
    config = WorkerConfig(host=host, advertise_address=address)
    assert advertised_address(config, 7, {"POD_IP": pod_ip} if pod_ip else {}, OWN.__getitem__) == expected


@pytest.mark.parametrize(
    ("host", "address", "expected"),
    [("10.0.0.4", "", "10.0.0.4"), ("::1", "", "::1"), ("0.0.0.0", "proxy:0", "proxy"), ("::", "", "10.1.2.3")],
)
def test_the_host_at_which_others_reach_this_one(
    host: str, address: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    assert own_host(WorkerConfig(host=host, advertise_address=address)) == expected


def test_the_machines_own_address_can_be_advertised() -> None:
    address = ipaddress.ip_address(default_route_address("0.0.0.0"))
    assert not address.is_unspecified and not address.is_loopback


def test_without_a_route_the_address_must_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(self: socket.socket, address: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_route)
    with pytest.raises(TandemError, match="--advertise-address"):
        default_route_address("::")


@pytest.mark.parametrize(
    ("host", "answer"),
    [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("::1", False), ("name", False), ("10.0.0.1", False)],
)
def test_wildcards(host: str, answer: bool) -> None:
    assert is_wildcard(host) is answer


async def test_a_worker_on_a_wildcard_address_advertises_its_pods_address(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", "127.0.0.3")
    node = await nodes.start(worker=WorkerConfig(host="0.0.0.0"), cluster=ClusterConfig(insecure=True))
    assert node.worker.me.address.startswith("127.0.0.3:")
    # The node's client has already connected there.
    reply = await node.client.stub.Describe(pb.DescribeRequest())
    assert reply.metrics_address.startswith("127.0.0.3:")
