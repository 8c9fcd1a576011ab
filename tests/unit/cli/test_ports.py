"""Test that a program refuses ports which are in use, or given twice, before it loads anything."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from tandem.cli import main
from tandem.cli.gateway_checks import gateway_ports
from tandem.cli.ports import PortSetting, require_free_ports
from tandem.core.config import GatewayConfig
from tandem.core.errors import TandemError
from tests.ports import free_port


def require_gateway_ports(config: GatewayConfig) -> None:
    require_free_ports(gateway_ports(config))


@pytest.mark.parametrize("command", ["serve", "gateway"])
@pytest.mark.parametrize("flag", ["--port", "--grpc-port", "--gateway-metrics-port"])
def test_a_taken_port_is_refused(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([command, "--port", "0", flag, str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tandem {command}: cannot listen on 127.0.0.1:{port}: ")
    assert error.endswith(f"another {flag}\n")


@pytest.mark.parametrize(
    ("name", "above", "host", "error_text"),
    [
        ("metrics_port", 0, "", "that of gateway.port too: choose another --gateway-metrics-port"),
        ("metrics_port", 0, "0.0.0.0", "that of gateway.port too"),
        ("metrics_port", 1, "", "that of gateway.grpc_port too"),
        ("grpc_port", 0, "", "that of gateway.port too: choose another --grpc-port"),
    ],
)
def test_a_port_that_is_given_twice_is_refused(name: str, above: int, host: str, error_text: str) -> None:
    port = free_port()
    twice = replace(GatewayConfig(port=port, metrics_host=host), **{name: port + above})
    with pytest.raises(TandemError, match=f"gateway.{name} {port + above} is {error_text}"):
        require_gateway_ports(twice)


def test_the_metrics_may_have_the_same_port_at_another_address() -> None:
    require_gateway_ports(GatewayConfig(port=free_port(), metrics_port=free_port(), metrics_host="127.0.0.2"))
    require_gateway_ports(GatewayConfig(port=0, grpc_port=0, metrics_port=0))


def test_a_wildcard_of_ipv4_leaves_the_ports_of_ipv6_addresses() -> None:
    port = free_port()
    require_gateway_ports(GatewayConfig(port=port, host="0.0.0.0", metrics_port=port, metrics_host="::1"))
    with pytest.raises(TandemError, match="metrics_port"):
        require_gateway_ports(GatewayConfig(port=port, host="::", metrics_port=port, metrics_host="127.0.0.1"))


def test_a_free_port_is_left_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    require_gateway_ports(GatewayConfig(port=port, grpc_port=0))
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("flag", ["--worker-port", "--metrics-port"])
def test_a_worker_whose_port_is_in_use_loads_no_model(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["worker", "--model", "/nowhere", flag, port]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: " in error and f"choose another {flag}" in error


def test_a_worker_whose_two_ports_are_equal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    assert main(["worker", "--model", "/nowhere", "--worker-port", port, "--metrics-port", port]) == 2
    assert f"worker.metrics_port {port} is that of worker.port too" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 80])
def test_a_host_that_is_not_this_machine_s_is_refused_by_its_own_name(host: str) -> None:
    with pytest.raises(TandemError, match=r"set worker\.host to an address of this machine") as error:
        require_free_ports([PortSetting("worker.port", "--worker-port", "worker.host", host, 0)])
    assert error.value.param == "worker.host"


@pytest.mark.parametrize("host", ["", "localhost", "::", "0.0.0.0"])
def test_names_and_wildcards_are_hosts(host: str) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    require_free_ports([PortSetting("worker.port", "--worker-port", "worker.host", host, 0)])
