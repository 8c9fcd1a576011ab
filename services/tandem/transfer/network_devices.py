"""Choose the network devices over which a rank moves KV: the interfaces of its TCP transport, and the RDMA ports that
UCX may use."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError

_SETTING = "transfer.network_devices"
_SIOCGIFADDR = 0x8915
"""Request of `ioctl` for the first IPv4 address of an interface."""
_ADDRESS_AT = 20
"""Offset in bytes of the IPv4 address in the answer: 16 bytes of name, then a `sockaddr_in`."""
_MAX_NAME_BYTES = 15
_GLOBAL_SCOPE = "00"
"""Scope in /proc/net/if_inet6 of an address that other machines can use."""


@dataclass(frozen=True, slots=True)
class NetworkDevices:
    """Hold the devices that `transfer.network_devices` names: `interfaces`, and `rdma_ports` such as `mlx5_0:1`."""

    interfaces: tuple[str, ...] = ()
    rdma_ports: tuple[str, ...] = ()


def find_devices(names: Sequence[str], root: Path = Path("/")) -> NetworkDevices:
    """Sort device names into interfaces and RDMA ports. An RDMA device without a port stands for its active ports.

    `root`: directory under which `sys` is found. Raises TandemError for a name that this machine lacks, and for an RDMA
    device without an active port.
    """
    interfaces: list[str] = []
    rdma_ports: list[str] = []
    active = active_rdma_ports(root)
    for name in names:
        device = name.partition(":")[0]
        if (root / "sys/class/infiniband" / device).is_dir():
            found = [port for port in active if name in (device, port) and port.partition(":")[0] == device]
            if not found:
                raise _refused(f"the RDMA device {name} has no active port (`rdma link` shows them)")
            rdma_ports += found
        elif (root / "sys/class/net" / name).exists():
            interfaces.append(name)
        else:
            raise _refused(f"this machine has no network device {name} (`ip link` and `rdma link` show what it has)")
    return NetworkDevices(tuple(interfaces), tuple(rdma_ports))


def active_rdma_ports(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the active RDMA ports of this machine, such as `mlx5_0:1`, in the order of their names."""
    ports = []
    for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                ports.append(f"{state.parts[-4]}:{state.parts[-2]}")
    return tuple(ports)


def closest_rdma_ports(pci_address: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the active RDMA ports whose path to the PCI device at `pci_address`, such as `0000:1b:00.0`, crosses the
    fewest bridges; several if they are equally close. Empty where the machine does not say where the devices are.

    A path in /sys/devices names every bridge between a device and its root complex, so the closest port has the longest
    part of its path in common with the device.
    """
    try:
        own = _bridges(root / "sys/bus/pci/devices" / pci_address.lower())
        shared = {
            port: _num_common(own, _bridges(root / "sys/class/infiniband" / port.partition(":")[0] / "device"))
            for port in active_rdma_ports(root)
        }
    except OSError:
        return ()
    most = max(shared.values(), default=0)
    return tuple(port for port, number in shared.items() if number == most)


def ucx_environment(
    named: NetworkDevices, pci_address: str | None, environ: Mapping[str, str], root: Path = Path("/")
) -> dict[str, str]:
    """Return the environment variables to set so that UCX uses the devices in `named`; if there are none, the RDMA
    ports closest to the GPU at `pci_address`, and any interface. Empty where UCX is to choose among all devices.

    `pci_address`: None without a GPU. `environ`: the environment so far; a variable that it has is not in the result.
    Raises TandemError if its UCX_NET_DEVICES differs from `named`.
    """
    is_set = "UCX_NET_DEVICES" in environ
    if devices := (*named.rdma_ports, *named.interfaces):
        wanted, num_rails = ",".join(devices), len(named.rdma_ports) or len(devices)
        if is_set and environ["UCX_NET_DEVICES"] != wanted:
            raise _refused(f"UCX_NET_DEVICES={environ['UCX_NET_DEVICES']} differs from {wanted}: set one of the two")
    else:
        closest = () if pci_address is None or is_set else closest_rdma_ports(pci_address, root)
        if len(closest) == len(active_rdma_ports(root)) or not closest:
            return {}
        interfaces = sorted(path.name for path in (root / "sys/class/net").iterdir())
        wanted, num_rails = ",".join((*closest, *interfaces)), len(closest)
    variables = {"UCX_NET_DEVICES": wanted, "UCX_MAX_RNDV_RAILS": str(num_rails)}
    return {name: value for name, value in variables.items() if name not in environ}


def interface_address(name: str) -> str:
    """Return the first IPv4 address of an interface, or its first global IPv6 address. Raises TandemError if it has
    neither."""
    request = struct.pack("256s", name.encode()[:_MAX_NAME_BYTES])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    raise _refused(f"the interface {name} has no address that other machines can use (`ip addr show {name}`)")


def _bridges(link: Path) -> tuple[str, ...]:
    """Return the parts of the path of a PCI device above the device itself. Raises OSError where it does not exist."""
    return link.resolve(strict=True).parent.parts


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _refused(problem: str) -> TandemError:
    return TandemError(ErrorKind.UNSUPPORTED, problem, param=_SETTING)
