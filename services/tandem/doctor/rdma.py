"""Check RDMA network cards, their GIDs, and whether they reach GPU memory, without opening a card.

Ports and GIDs are read from /sys/class/infiniband (see the kernel's sysfs-class-infiniband).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core.config import TransferConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, format_version, ok, skip, warn, wrong
from tandem.doctor.system import System
from tandem.transfer.network_devices import (
    NEITHER,
    closest_rdma_ports,
    find_devices,
    interface_address,
    ucx_environment,
)

_CLASS = "/sys/class/infiniband"
_GPUS = "/proc/driver/nvidia/gpus"
"""Directory with an entry for each GPU, named by its PCI address."""
_NAME_DEVICES = "correct transfer.network_devices; in a pod, interfaces of its secondary networks are called net1, net2"
_AMAZON = "0x1d0f"
_ROCE_V2 = "RoCE v2"
_IPV4_MAPPED = re.compile(r"^(0000:){5}ffff:(?!0000:0000)")
_DMABUF_KERNEL = (5, 12)
"""First Linux version in which a card can register GPU memory by dma-buf, without nvidia_peermem."""
_IN_A_POD = "in a pod set `pools.<name>.rdma` (the RDMA device plugin's resource) and `pools.<name>.hostNetwork: true`"


@dataclass(frozen=True, slots=True)
class Gid:
    """Hold an entry of the GID table of an RDMA port: an address under which the port can be reached.

    `index`: position of the entry in the table. `kind`: the kernel's name of the entry's type, "IB/RoCE v1" or "RoCE
    v2"."""

    index: int
    address: str
    kind: str

    @property
    def is_ipv4_v2(self) -> bool:
        return self.kind == _ROCE_V2 and bool(_IPV4_MAPPED.match(self.address))


@dataclass(frozen=True, slots=True)
class Port:
    """Describe a port of an RDMA network card.

    `device`: name of the card. `number`: number of the port on the card. `state`: "ACTIVE", "DOWN" or another name of
    the kernel. `link_layer`: "InfiniBand" or "Ethernet". `rate`: bandwidth as the kernel prints it. `gids`: addresses
    of the port. `vendor`: PCI vendor of the card, such as "0x15b3"."""

    device: str
    number: int
    state: str
    link_layer: str
    rate: str
    gids: tuple[Gid, ...]
    vendor: str = ""

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def is_roce(self) -> bool:
        return self.link_layer == "Ethernet"


@dataclass(frozen=True, slots=True)
class Rdma:
    """Describe the RDMA network cards of this machine, and what programs and GPUs need to use them.

    `ports`: the ports of all cards. `has_verbs`: programs can open a card (/dev/infiniband/uverbs*). `has_peermem`:
    nvidia_peermem is loaded. `has_open_driver`: NVIDIA's kernel modules are the open ones. `kernel`: Linux version,
    such as (5, 12)."""

    ports: tuple[Port, ...]
    has_verbs: bool
    has_peermem: bool
    has_open_driver: bool
    kernel: tuple[int, int]

    @property
    def is_usable(self) -> bool:
        return self.has_verbs and any(port.is_active for port in self.ports)


def read_rdma(system: System) -> Rdma:
    verbs = [name for name in system.names("/dev/infiniband") if name.startswith("uverbs")]
    release = re.match(r"(\d+)\.(\d+)", system.text("/proc/sys/kernel/osrelease"))
    return Rdma(
        ports=tuple(_ports(system)),
        has_verbs=bool(verbs),
        has_peermem=system.path("/sys/module/nvidia_peermem").is_dir(),
        has_open_driver="Open Kernel Module" in system.text("/proc/driver/nvidia/version"),
        kernel=(int(release[1]), int(release[2])) if release else (0, 0),
    )


def judge_devices(rdma: Rdma, *, is_required: bool) -> tuple[Finding, ...]:
    """Return a finding for each RDMA port; if there is no port, or no program can open one, return one finding for all.

    `is_required`: whether `transfer.require` is rdma, so that having no usable port is a failure."""
    if not rdma.ports:
        if is_required:
            fix = f"install the driver of the network card (`rdma link` shows what there is); {_IN_A_POD}"
            return (fail("rdma", "transfer.require is rdma, and there is no RDMA device", fix),)
        return (skip("rdma", "there is no RDMA device, and transfer.require needs none"),)
    if not rdma.has_verbs:
        fix = f"run `modprobe ib_uverbs`; docker: set --device=/dev/infiniband; {_IN_A_POD}"
        names = ", ".join(port.name for port in rdma.ports)
        return (
            wrong("rdma", f"{names}, and no /dev/infiniband/uverbs* by which to open them", fix, is_fatal=is_required),
        )
    is_any = rdma.is_usable
    return tuple(_device(port, is_fatal=is_required and not is_any) for port in rdma.ports)


def judge_efa(rdma: Rdma, transfer: TransferConfig) -> Finding:
    """Return a finding on whether NIXL uses the library that AWS' EFA cards need (LIBFABRIC). Skipped if there is no
    such card, or `transfer.backend` does not use NIXL."""
    cards = sorted({port.device for port in rdma.ports if port.vendor == _AMAZON})
    if not cards:
        return skip("efa", "there is no EFA card")
    names = ", ".join(cards)
    if transfer.backend not in ("auto", "nixl"):
        return skip("efa", f"transfer.backend is {transfer.backend}, which does not use {names}")
    if transfer.nixl_backend_names[0] == "LIBFABRIC":
        return ok("efa", f"{names}, and NIXL prefers LIBFABRIC")
    found = f"{names}, and transfer.nixl_backends prefers {transfer.nixl_backend_names[0]}: over EFA it is very slow"
    return warn("efa", found, "set transfer.nixl_backends=LIBFABRIC,UCX and install libfabric with EFA's provider")


def check_network_devices(system: System, transfer: TransferConfig) -> Finding:
    """Return a finding on whether this machine has the devices that `transfer.network_devices` names; if it names none,
    on the RDMA ports that are closest to each GPU, which would be the ones to name."""
    root = system.path("/")
    if transfer.backend == "local":
        return skip("network-devices", "transfer.backend is local, which uses no network")
    try:
        found = find_devices(transfer.network_device_names, root)
        if transfer.backend != "tcp":
            ucx_environment(found, system.environ)  # raises where the two differ
        addresses = [f"{name} ({interface_address(name)})" for name in found.interfaces]
    except TandemError as error:
        return fail("network-devices", error.message, _NAME_DEVICES)
    if found.missing:
        return fail("network-devices", f"this machine lacks {', '.join(found.missing)} ({NEITHER})", _NAME_DEVICES)
    if found.names:
        return ok("network-devices", f"this machine has {', '.join((*found.rdma_ports, *addresses))}")
    closest = {gpu: closest_rdma_ports(gpu, root) for gpu in system.names(_GPUS)}
    if not any(closest.values()):
        return skip("network-devices", "transfer.network_devices is empty, and no GPU has an RDMA port beside it")
    each = "; ".join(f"GPU {gpu}: {', '.join(ports) or 'unknown'}" for gpu, ports in sorted(closest.items()))
    devices = system.environ.get("UCX_NET_DEVICES")
    chosen = "UCX chooses among all devices" if devices is None else f"UCX_NET_DEVICES={devices} decides"
    return ok("network-devices", f"{chosen}; the closest RDMA ports are {each}")


def judge_gids(rdma: Rdma, gid_index: str, *, is_required: bool) -> tuple[Finding, ...]:
    """Return a finding for each active RoCE port on whether the port has a usable GID (address in the network).

    `gid_index`: value of the variable UCX_IB_GID_INDEX; if it is empty, UCX chooses a RoCE v2 GID itself.
    `is_required`: whether `transfer.require` is rdma, so that a missing GID is a failure."""
    ports = [port for port in rdma.ports if port.is_roce and port.is_active]
    if not ports:
        return (skip("gid", "there is no active RoCE port, and other ports need no GID"),)
    return tuple(_gid(port, gid_index, is_fatal=is_required) for port in ports)


def judge_gpu_direct(rdma: Rdma, *, is_cuda: bool, is_required: bool) -> Finding:
    if not is_cuda:
        return skip("gpudirect", "model.device is cpu: KV is host memory")
    if not rdma.is_usable:
        return skip("gpudirect", "no RDMA port is active")
    if rdma.has_peermem:
        return ok("gpudirect", "network cards reach GPU memory (nvidia_peermem is loaded)")
    if rdma.has_open_driver and rdma.kernel >= _DMABUF_KERNEL:
        return ok(
            "gpudirect",
            f"network cards reach GPU memory (dma-buf: open kernel modules, Linux {format_version(rdma.kernel)})",
        )
    return wrong(
        "gpudirect",
        "network cards do not reach GPU memory: there is neither nvidia_peermem nor dma-buf (open kernel modules and "
        f"Linux {format_version(_DMABUF_KERNEL)} or later)",
        "run `modprobe nvidia_peermem` on the node (GPU operator: driver.rdma.enabled=true), or use the open modules",
        is_fatal=is_required,
    )


def _ports(system: System) -> Iterator[Port]:
    for device in system.names(_CLASS):
        for number in system.names(f"{_CLASS}/{device}/ports"):
            where = f"{_CLASS}/{device}/ports/{number}"
            yield Port(
                device=device,
                number=int(number),
                state=system.text(f"{where}/state").rpartition(": ")[2],
                link_layer=system.text(f"{where}/link_layer"),
                rate=system.text(f"{where}/rate"),
                gids=tuple(_gids(system, where)),
                vendor=system.text(f"{_CLASS}/{device}/device/vendor").strip(),
            )


def _gids(system: System, port: str) -> Iterator[Gid]:
    for index in system.names(f"{port}/gids"):
        address = system.text(f"{port}/gids/{index}")
        if address.replace(":", "").strip("0"):  # an unused entry is all zeros
            yield Gid(int(index), address, system.text(f"{port}/gid_attrs/types/{index}"))


def _device(port: Port, *, is_fatal: bool) -> Finding:
    summary = f"{port.name} {port.link_layer}, {port.rate or 'rate unknown'}, {port.state or 'state unknown'}"
    if port.is_active:
        return ok("rdma", summary)
    link = f"`ip link set dev <interface of {port.device}> up`" if port.is_roce else "start a subnet manager (opensm)"
    fix = f"check the cable and the switch port (`rdma link show`), then {link}; or exclude it by UCX_NET_DEVICES"
    return wrong("rdma", summary, fix, is_fatal=is_fatal)


def _gid(port: Port, gid_index: str, *, is_fatal: bool) -> Finding:
    good = [gid.index for gid in port.gids if gid.is_ipv4_v2]
    if not good:
        kinds = ", ".join(sorted({gid.kind or "unknown" for gid in port.gids})) or "none at all"
        fix = (
            f"give the interface of {port.device} an IPv4 address (`ip addr add`); in a pod set "
            "`pools.<name>.hostNetwork: true` or a secondary network of the RDMA device plugin"
        )
        return wrong("gid", f"{port.name} has no RoCE v2 GID of an IPv4 address ({kinds})", fix, is_fatal=is_fatal)
    summary = f"{port.name} has RoCE v2 GIDs of IPv4 addresses at {', '.join(map(str, good))}"
    if not gid_index or gid_index == "auto":
        return ok("gid", f"{summary}; UCX chooses, because UCX_IB_GID_INDEX is unset")
    if gid_index in map(str, good):
        return ok("gid", f"{summary}; UCX_IB_GID_INDEX={gid_index}")
    fix = f"unset UCX_IB_GID_INDEX, or set UCX_IB_GID_INDEX={good[0]} (in a pod in `pools.<name>.ucx`)"
    return warn("gid", f"{summary}, and UCX_IB_GID_INDEX={gid_index} names another one", fix)
