"""Test the check of RDMA cards, GIDs and access to GPU memory with a made-up /sys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.config import TransferConfig
from tandem.doctor.finding import Finding
from tandem.doctor.rdma import (
    Gid,
    Port,
    Rdma,
    check_network_devices,
    judge_devices,
    judge_efa,
    judge_gids,
    judge_gpu_direct,
    read_rdma,
)
from tests.rdma_machine import make_machine
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
UNSET = "0000:0000:0000:0000:0000:ffff:0000:0000"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
GOOD = (Gid(0, LINK_LOCAL, "IB/RoCE v1"), Gid(3, IPV4, "RoCE v2"))


def port(state: str = "ACTIVE", layer: str = "Ethernet", gids: tuple[Gid, ...] = GOOD) -> Port:
    return Port("mlx5_0", 1, state, layer, "100 Gb/sec (4X EDR)", gids)


def rdma(*ports: Port, verbs: bool = True, peermem: bool = False, is_open: bool = False, linux: int = 15) -> Rdma:
    return Rdma(ports, verbs, peermem, is_open, (5, linux))


NONE = rdma(verbs=False)


def tree(state: str) -> dict[str, str]:
    where = "/sys/class/infiniband/mlx5_0/ports/1"
    return {
        f"{where}/state": f"{state}\n",
        f"{where}/link_layer": "Ethernet\n",
        f"{where}/rate": "100 Gb/sec (4X EDR)\n",
        f"{where}/gids/0": LINK_LOCAL,
        f"{where}/gids/2": EMPTY,
        f"{where}/gids/3": IPV4,
        f"{where}/gid_attrs/types/0": "IB/RoCE v1\n",
        f"{where}/gid_attrs/types/3": "RoCE v2\n",
    }


def test_ports_are_read_from_sys(tmp_path: Path) -> None:
    more = {
        "/dev/infiniband/uverbs0": "",
        "/sys/module/nvidia_peermem/version": "",
        "/proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n",
    }
    assert read_rdma(system(tmp_path, {**tree("4: ACTIVE"), **more})) == Rdma((port(),), True, True, True, (6, 1))


def test_the_vendor_of_a_card_is_read(tmp_path: Path) -> None:
    vendor = {"/sys/class/infiniband/mlx5_0/device/vendor": "0x1d0f\n"}
    (found,) = read_rdma(system(tmp_path, tree("4: ACTIVE") | vendor)).ports
    assert found.vendor == "0x1d0f"


def test_the_ports_closest_to_each_gpu_are_named(tmp_path: Path) -> None:
    make_machine(tmp_path)
    closest = "the closest RDMA ports are GPU 0000:1b:00.0: mlx5_0:1, mlx5_1:1"
    found = check_network_devices(system(tmp_path, {}), TransferConfig())
    assert_fine(found, "network-devices", f"UCX chooses among all devices; {closest}")
    found = check_network_devices(system(tmp_path, {}, UCX_NET_DEVICES="mlx5_3:1"), TransferConfig())
    assert_fine(found, "network-devices", f"UCX_NET_DEVICES=mlx5_3:1 decides; {closest}")
    found = check_network_devices(system(tmp_path, {}), TransferConfig(network_devices="mlx5_3"))
    assert_fine(found, "network-devices", "this machine has mlx5_3:1")
    assert_skips(
        check_network_devices(system(tmp_path, {}), TransferConfig(backend="local")), "network-devices", "local"
    )


@pytest.mark.parametrize(
    ("names", "devices", "problem"),
    [
        ("eth7", "", "this machine lacks eth7"),
        ("eth7,mlx5_0", "", "this machine lacks eth7"),
        ("mlx5_4,mlx5_0", "", "this machine lacks mlx5_4 (neither an interface nor"),
        ("mlx5_0", "lo", "UCX_NET_DEVICES=lo differs"),
    ],
)
def test_devices_that_are_missing_or_differ_from_those_of_ucx_are_reported(
    tmp_path: Path, names: str, devices: str, problem: str
) -> None:
    make_machine(tmp_path)
    environ = {"UCX_NET_DEVICES": devices} if devices else {}
    found = check_network_devices(system(tmp_path, {}, **environ), TransferConfig(network_devices=names))
    assert_fails(found, "network-devices", problem, "correct transfer.network_devices")


def test_without_gpus_and_names_the_devices_are_not_checked(tmp_path: Path) -> None:
    assert_skips(check_network_devices(system(tmp_path, {}), TransferConfig()), "network-devices", "is empty")


def test_efa_needs_libfabric() -> None:
    efa = rdma(replace(port(layer="Unspecified", gids=()), vendor="0x1d0f"))
    assert_skips(judge_efa(rdma(port()), TransferConfig()), "efa", "no EFA card")
    assert_warns(judge_efa(efa, TransferConfig()), "efa", "prefers UCX", "transfer.nixl_backends=LIBFABRIC,UCX")
    assert_fine(judge_efa(efa, TransferConfig(nixl_backends="libfabric")), "efa", "prefers LIBFABRIC")
    assert_skips(judge_efa(efa, TransferConfig(backend="tcp")), "efa", "does not use mlx5_0")


def test_a_machine_without_any(tmp_path: Path) -> None:
    found = read_rdma(system(tmp_path, {"/proc/sys/kernel/osrelease": "5.15.0"}))
    assert (found, found.is_usable) == (NONE, False)


def test_devices_that_are_up() -> None:
    (finding,) = judge_devices(rdma(port()), is_required=True)
    assert_fine(finding, "rdma", "mlx5_0:1 Ethernet, 100 Gb/sec (4X EDR), ACTIVE")


def test_no_device_is_fine_unless_it_is_required() -> None:
    assert_skips(judge_devices(NONE, is_required=False)[0], "rdma", "there is no RDMA device")
    (finding,) = judge_devices(NONE, is_required=True)
    assert_fails(finding, "rdma", "transfer.require is rdma", "`pools.<name>.rdma`")


def test_devices_without_verbs_cannot_be_opened() -> None:
    (finding,) = judge_devices(rdma(port(), verbs=False), is_required=True)
    assert_fails(finding, "rdma", "no /dev/infiniband/uverbs*", "--device=/dev/infiniband")
    (finding,) = judge_devices(rdma(port(), verbs=False), is_required=False)
    assert_warns(finding, "rdma", "mlx5_0:1", "`modprobe ib_uverbs`")


def test_a_port_that_is_down() -> None:
    up, down = judge_devices(rdma(port(), port(state="DOWN")), is_required=True)
    assert_fine(up, "rdma", "ACTIVE")
    assert_warns(down, "rdma", "DOWN", "`ip link set dev <interface of mlx5_0> up`")
    (finding,) = judge_devices(rdma(port(state="DOWN", layer="InfiniBand")), is_required=True)
    assert_fails(finding, "rdma", "InfiniBand", "opensm")


@pytest.mark.parametrize("index", ["", "auto", "3"])
def test_a_roce_port_with_an_address(index: str) -> None:
    (finding,) = judge_gids(rdma(port()), index, is_required=True)
    assert_fine(finding, "gid", "mlx5_0:1 has RoCE v2 GIDs of IPv4 addresses at 3")


def test_a_gid_index_of_an_unusable_gid() -> None:
    (finding,) = judge_gids(rdma(port()), "0", is_required=True)
    assert_warns(finding, "gid", "UCX_IB_GID_INDEX=0 names another one", "UCX_IB_GID_INDEX=3")


@pytest.mark.parametrize(
    "gids",
    [(), (Gid(0, IPV4, "IB/RoCE v1"),), (Gid(1, LINK_LOCAL, "RoCE v2"),), (Gid(1, UNSET, "RoCE v2"),)],
    ids=["none", "v1", "ipv6", "unset"],
)
def test_a_roce_port_without_an_address(gids: tuple[Gid, ...]) -> None:
    for is_required, judged in ((True, assert_fails), (False, assert_warns)):
        (finding,) = judge_gids(rdma(port(gids=gids)), "", is_required=is_required)
        judged(finding, "gid", "no RoCE v2 GID of an IPv4 address", "an IPv4 address (`ip addr add`)")


def test_infiniband_needs_no_gid() -> None:
    (finding,) = judge_gids(rdma(port(layer="InfiniBand", gids=())), "", is_required=True)
    assert_skips(finding, "gid", "no active RoCE port")


def test_access_to_gpu_memory() -> None:
    def judged(found: Rdma) -> Finding:
        return judge_gpu_direct(found, is_cuda=True, is_required=True)

    assert_fine(judged(rdma(port(), peermem=True)), "gpudirect", "nvidia_peermem is loaded")
    assert_fine(judged(rdma(port(), is_open=True)), "gpudirect", "dma-buf")
    for found in (rdma(port()), rdma(port(), is_open=True, linux=10)):
        assert_fails(judged(found), "gpudirect", "neither", "`modprobe nvidia_peermem`")
    weak = judge_gpu_direct(rdma(port()), is_cuda=True, is_required=False)
    assert_warns(weak, "gpudirect", "neither", "GPU operator")
    assert_skips(judge_gpu_direct(rdma(port()), is_cuda=False, is_required=True), "gpudirect", "model.device is cpu")
    assert_skips(judge_gpu_direct(NONE, is_cuda=True, is_required=True), "gpudirect", "no RDMA port is active")
