"""Test which network devices KV moves over, on machines whose /sys is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.errors import TandemError
from tandem.transfer.network_devices import (
    NetworkDevices,
    _ipv6_address,
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
    ("names", "ports", "interfaces", "missing"),
    [
        (("eth0", "eth7"), (), ("eth0",), ("eth7",)),
        (("mlx5_4", "mlx5_1"), ("mlx5_1:1",), (), ("mlx5_4",)),
        (("mlx5_0", "mlx5_0:1", "eth1", "eth1"), ("mlx5_0:1",), ("eth1",), ()),
    ],
)
def test_a_device_that_is_missing_or_down_is_left_out_and_none_counts_twice(
    root: Path, names: tuple[str, ...], ports: tuple[str, ...], interfaces: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    assert find_devices(names, root) == NetworkDevices(interfaces, ports, missing)


def test_a_name_that_is_both_stands_for_both(root: Path) -> None:
    (root / "sys/class/net/mlx5_0").mkdir()
    (root / "sys/class/net/bonding_masters").write_text("")
    assert find_devices(("mlx5_0",), root) == NetworkDevices(("mlx5_0",), ("mlx5_0:1",))
    with pytest.raises(TandemError, match="lacks bonding_masters"):
        find_devices(("bonding_masters",), root)


@pytest.mark.parametrize("names", [("eth7",), ("mlx5_4",), ("mlx5_0:2", "eth9")])
def test_a_worker_without_any_of_its_devices_is_refused(root: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(TandemError, match=f"this machine lacks {', '.join(names)}") as error:
        find_devices(names, root)
    assert error.value.param == "transfer.network_devices"


def test_the_closest_ports_are_those_behind_the_switch_of_the_gpu(root: Path) -> None:
    assert closest_rdma_ports(GPU.upper(), root) == ("mlx5_0:1", "mlx5_1:1")
    disconnect(root, "mlx5_0", "mlx5_1")
    assert closest_rdma_ports(GPU, root) == ("mlx5_2:1",)
    assert active_rdma_ports(root) == ("mlx5_2:1", "mlx5_3:1")


def test_a_machine_without_paths_of_devices_has_no_closest_port(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert closest_rdma_ports("0000:ff:00.0", root) == ()
    assert closest_rdma_ports(GPU, tmp_path_factory.mktemp("empty")) == ()


def test_named_devices_are_the_only_ones_that_ucx_uses() -> None:
    assert ucx_environment(NetworkDevices(), {"UCX_NET_DEVICES": "lo"}) == {}
    devices = NetworkDevices(("eth1",), ("mlx5_2:1", "mlx5_3:1"))
    expected = {"UCX_NET_DEVICES": "mlx5_2:1,mlx5_3:1,eth1", "UCX_MAX_RMA_RAILS": "2"}
    assert ucx_environment(devices, {}) == expected
    assert ucx_environment(devices, expected) == {}, "a second transport of the process"
    assert ucx_environment(devices, {"UCX_MAX_RMA_RAILS": "4"}) == {"UCX_NET_DEVICES": expected["UCX_NET_DEVICES"]}
    assert ucx_environment(NetworkDevices(("a", "b", "c")), {})["UCX_MAX_RMA_RAILS"] == "3"
    with pytest.raises(TandemError, match="UCX_NET_DEVICES=lo differs from mlx5_2:1,mlx5_3:1,eth1"):
        ucx_environment(devices, {"UCX_NET_DEVICES": "lo"})


def test_an_interface_has_an_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(TandemError, match="no address"):
        interface_address("no-such-device")


def test_an_interface_without_ipv4_has_its_permanent_global_address() -> None:
    table = (
        "fe800000000000000a0027fffe000001 02 40 20 80     eth1\n"
        "20010db8000000000000000000000009 02 40 00 01     eth1\n"
        "20010db8000000000000000000000007 02 40 00 80     eth1\n"
        "20010db8000000000000000000000005 03 40 00 80     eth2\n"
    )
    assert [_ipv6_address(name, table) for name in ("eth1", "eth2", "eth3")] == ["2001:db8::7", "2001:db8::5", ""]
