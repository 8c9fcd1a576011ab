"""Test which network devices KV moves over, on machines whose /sys is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.errors import TandemError
from tandem.transfer.network_devices import (
    NetworkDevices,
    active_rdma_ports,
    closest_rdma_ports,
    find_devices,
    interface_address,
    ucx_environment,
)
from tests.rdma_machine import GPU, disconnect, make_machine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_machine(tmp_path)
    return tmp_path


def test_names_are_interfaces_and_rdma_ports(root: Path) -> None:
    found = find_devices(("eth1", "mlx5_3", "mlx5_0:1", "eth0"), root)
    assert found == NetworkDevices(("eth1", "eth0"), ("mlx5_3:1", "mlx5_0:1"))
    assert find_devices((), root) == NetworkDevices()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("eth7", "no network device eth7"), ("mlx5_4", "no active port"), ("mlx5_0:2", "no active port")],
)
def test_a_device_that_is_missing_or_down_is_refused(root: Path, name: str, problem: str) -> None:
    with pytest.raises(TandemError, match=problem) as error:
        find_devices(("eth0", name), root)
    assert error.value.param == "transfer.network_devices"


def test_the_closest_ports_are_those_behind_the_switch_of_the_gpu(root: Path) -> None:
    assert closest_rdma_ports(GPU.upper(), root) == ("mlx5_0:1", "mlx5_1:1")
    disconnect(root, "mlx5_0", "mlx5_1")
    assert closest_rdma_ports(GPU, root) == ("mlx5_2:1",)
    assert active_rdma_ports(root) == ("mlx5_2:1", "mlx5_3:1")


def test_a_machine_that_does_not_tell_has_no_closest_port(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert closest_rdma_ports("0000:ff:00.0", root) == ()
    assert closest_rdma_ports(GPU, tmp_path_factory.mktemp("empty")) == ()


def test_ucx_uses_the_ports_closest_to_the_gpu_at_once(root: Path) -> None:
    assert ucx_environment(NetworkDevices(), GPU, {}, root) == {
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1,eth0,eth1,lo",
        "UCX_MAX_RNDV_RAILS": "2",
    }
    disconnect(root, "mlx5_2", "mlx5_3")
    assert ucx_environment(NetworkDevices(), GPU, {}, root) == {}, "all are equally close"


def test_ucx_chooses_without_a_gpu_and_where_the_user_has(root: Path) -> None:
    assert ucx_environment(NetworkDevices(), None, {}, root) == {}
    assert ucx_environment(NetworkDevices(), GPU, {"UCX_NET_DEVICES": "mlx5_3:1"}, root) == {}


def test_named_devices_are_the_only_ones_that_ucx_uses(root: Path) -> None:
    named = NetworkDevices(("eth1",), ("mlx5_3:1",))
    expected = {"UCX_NET_DEVICES": "mlx5_3:1,eth1", "UCX_MAX_RNDV_RAILS": "1"}
    assert ucx_environment(named, GPU, {}, root) == expected
    assert ucx_environment(named, None, expected, root) == {}, "a second transport of the process"
    kept = ucx_environment(named, GPU, {"UCX_MAX_RNDV_RAILS": "4"}, root)
    assert kept == {"UCX_NET_DEVICES": "mlx5_3:1,eth1"}
    interfaces = NetworkDevices(("eth0", "eth1"))
    assert ucx_environment(interfaces, GPU, {}, root)["UCX_MAX_RNDV_RAILS"] == "2"
    with pytest.raises(TandemError, match="UCX_NET_DEVICES=lo differs from mlx5_3:1,eth1"):
        ucx_environment(named, GPU, {"UCX_NET_DEVICES": "lo"}, root)


def test_an_interface_has_an_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(TandemError, match="no address"):
        interface_address("no-such-device")
