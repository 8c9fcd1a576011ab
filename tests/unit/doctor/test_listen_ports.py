"""Test addresses that are free, that are taken, and that a running Tandem uses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tandem.core.config import ClusterConfig, Config, GatewayConfig, WorkerConfig
from tandem.doctor.finding import Finding
from tandem.doctor.own_addresses import (
    ConfiguredAddress,
    check_address,
    configured_addresses,
)
from tandem.obs.metrics.metrics_server import MetricsEndpoint
from tandem.wire.tls import TlsFiles
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.doctor.verdicts import assert_fails, assert_fine
from tests.unit.http_server import QuietHandler, serving

OPEN = ClusterConfig()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def judged(configured: ConfiguredAddress, cluster: ClusterConfig = OPEN) -> Finding:
    return check_address(configured, cluster)


def test_a_port_that_is_free() -> None:
    port = free_port()
    assert_fine(
        judged(ConfiguredAddress("gateway.port", "127.0.0.1", port, "http")), "ports", f"127.0.0.1:{port} is free"
    )
    assert_fine(judged(ConfiguredAddress("worker.port", "127.0.0.1", 0, "grpc")), "ports", "any free port")


def test_a_port_of_another_program(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that accepts and does not answer is not Tandem's."""
    monkeypatch.setattr("tandem.doctor.own_addresses._ANSWER_S", 0.1)
    finding = judged(ConfiguredAddress("gateway.grpc_port", "127.0.0.1", taken, "grpc"))
    assert_fails(finding, "ports", f"127.0.0.1:{taken} is taken by another program", f"'sport = :{taken}'")
    assert finding.fix.endswith("another gateway.grpc_port")


def test_a_host_of_another_machine() -> None:
    finding = judged(ConfiguredAddress("gateway.port", "192.0.2.1", 8000, "http"))
    assert_fails(finding, "ports", "gateway.port 192.0.2.1:8000", "a gateway.host of this machine")
    finding = judged(ConfiguredAddress("worker.port", "no.such.host.invalid", 8000, "grpc"))
    assert_fails(finding, "ports", "no.such.host.invalid is not a known host", "a worker.host of this machine")


def test_metrics_of_a_worker_are_ours() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0, lambda accept: ("text/plain", b"nothing"))
    endpoint.start()
    try:
        port = int(endpoint.address.rpartition(":")[2])
        finding = judged(ConfiguredAddress("worker.metrics_port", "0.0.0.0", port, "metrics"))
        assert_fine(finding, "ports", "is taken by a Tandem that answers")
        assert_fails(
            judged(ConfiguredAddress("gateway.port", "127.0.0.1", port, "http")),
            "ports",
            "by another program",
            "ss -ltnp",
        )
    finally:
        endpoint.close()


def test_a_worker_s_grpc_is_ours() -> None:
    """A worker is recognized because it does not implement the health call."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        finding = judged(ConfiguredAddress("worker.port", "127.0.0.1", port, "grpc"))
        assert_fine(finding, "ports", "is taken by a Tandem that answers")
    finally:
        server.stop(None).wait()


def test_a_worker_s_port_with_tls_is_ours(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    theirs, ours = authority.issue("theirs"), authority.issue("ours")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", TlsFiles.of_cluster(theirs).server_credentials())
    server.start()
    try:
        configured = ConfiguredAddress("worker.port", "127.0.0.1", port, "grpc")
        assert_fine(judged(configured, ours), "ports", "is taken by a Tandem that answers")
        strange = ClusterConfig(tls_cert_file="none", tls_key_file="none", tls_ca_file="none")
        for cluster in (OPEN, strange):
            assert_fails(judged(configured, cluster), "ports", "is taken by another program", "ss -ltnp")
    finally:
        server.stop(None).wait()


def test_a_gateway_s_ports_with_tls_are_ours(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue_for_gateway("own", requires_client=True), authority.issue_for_gateway("other")

    class Health(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200, b'{"status":"ok"}')

    calls = grpc.server(ThreadPoolExecutor(1))
    grpc_port = calls.add_secure_port("127.0.0.1:0", TlsFiles.of_gateway(own).server_credentials())
    calls.start()
    try:
        with serving(Health, TlsFiles.of_gateway(own).context()) as web:
            for files, is_ours in ((own, True), (other, False)):
                gateway = replace(files, port=web.server_port, grpc_port=grpc_port)
                http_place, grpc_place, _ = configured_addresses(Config(gateway=gateway))
                for place in (http_place, grpc_place):
                    if is_ours:
                        assert_fine(judged(place), "ports", "is taken by a Tandem that answers")
                    else:
                        assert_fails(judged(place), "ports", "is taken by another program", "ss -ltnp")
    finally:
        calls.stop(None).wait()


def test_addresses_that_are_checked() -> None:
    first, second = free_port(), free_port()
    config = Config(gateway=GatewayConfig(port=first, grpc_port=0), worker=WorkerConfig(metrics_port=second))
    configured = configured_addresses(config)
    assert [one.key for one in configured] == ["gateway.port", "worker.port", "worker.metrics_port"]
    assert [one.part for one in configured] == ["gateway", "worker", "worker"]
    apart = GatewayConfig(grpc_port=0, metrics_port=first, metrics_host="127.0.0.2", tls_cert_file="cert")
    metrics = configured_addresses(Config(gateway=apart))[1]
    assert metrics == ConfiguredAddress("gateway.metrics_port", "127.0.0.2", first, "http", "cert")
