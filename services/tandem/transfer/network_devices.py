"""Find the network devices over which KV moves: interfaces for the TCP transport, and those that UCX may use."""

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

NEITHER = "neither an interface nor an RDMA device with an active port"
_SETTING = "transfer.network_devices"
_SIOCGIFADDR = 0x8915
"""Request of `ioctl` for the first IPv4 address of an interface."""
_ADDRESS_AT = 20
"""Offset in bytes of the IPv4 address in the answer: 16 bytes of name, then a `sockaddr_in`."""
_MAX_NAME_BYTES = 15
_GLOBAL_SCOPE, _PERMANENT = "00", 0x80
"""In /proc/net/if_inet6, the scope of an address that other machines can use, and the flag of one that does not expire.
"""


@dataclass(frozen=True, slots=True)
class NetworkDevices:
    """Hold the devices that `transfer.network_devices` names: `interfaces`, and `rdma_ports` such as `mlx5_0:1`.
    `missing`: names of devices that this machine lacks or whose ports are down."""

    interfaces: tuple[str, ...] = ()
    rdma_ports: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.rdma_ports, *self.interfaces)


def find_devices(names: Sequence[str], root: Path = Path("/")) -> NetworkDevices:
    """Sort device names into interfaces and RDMA ports. An RDMA device without a port stands for its active ports, and
    a name that is both an interface and an RDMA device stands for both.

    `root`: directory under which `sys` is found. Raises TandemError if this machine has none of the named devices.
    """
    interfaces: dict[str, None] = {}
    rdma_ports: dict[str, None] = {}
    missing = []
    active = active_rdma_ports(root)
    for name in names:
        ports = [port for port in active if name in (port, port.partition(":")[0])]
        is_interface = (root / "sys/class/net" / name).is_dir()
        rdma_ports |= dict.fromkeys(ports)
        interfaces |= dict.fromkeys([name] if is_interface else [])
        if not ports and not is_interface:
            missing.append(name)
    if names and not interfaces and not rdma_ports:
        raise _refused(
            f"this machine lacks {', '.join(missing)} ({NEITHER}; `ip link` and `rdma link` show what it has)"
        )
    return NetworkDevices(tuple(interfaces), tuple(rdma_ports), tuple(missing))


def active_rdma_ports(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the active RDMA ports of this machine, such as `mlx5_0:1`, in the order of their names."""
    ports = []
    for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                ports.append(f"{state.parts[-4]}:{state.parts[-2]}")
    return tuple(ports)


def closest_rdma_ports(pci_address: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the active RDMA ports that share the most bridges with the PCI device at `pci_address`, such as
    `0000:1b:00.0`; several if they share equally many. Empty where the machine does not say where the devices are.

    A path in /sys/devices names every bridge between a device and its root complex.
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


def ucx_environment(devices: NetworkDevices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set so that UCX uses `devices` only, and all its RDMA ports at once. Empty if
    there are no devices, so that UCX chooses among all.

    `environ`: the environment so far; a variable that it has is not in the result. Raises TandemError if its
    UCX_NET_DEVICES differs from `devices`.
    """
    if not devices.names:
        return {}
    listed = ",".join(devices.names)
    if environ.get("UCX_NET_DEVICES", listed) != listed:
        raise _refused(f"UCX_NET_DEVICES={environ['UCX_NET_DEVICES']} differs from {listed}: set one of the two")
    # NIXL reads by RMA operations, and itself limits them to two rails.
    num_rails = len(devices.rdma_ports) or len(devices.interfaces)
    variables = {"UCX_NET_DEVICES": listed, "UCX_MAX_RMA_RAILS": str(num_rails)}
    return {name: value for name, value in variables.items() if name not in environ}


def interface_address(name: str) -> str:
    """Return the first IPv4 address of an interface, or its first global permanent IPv6 address. Raises TandemError if
    it has neither."""
    request = struct.pack("256s", name.encode()[:_MAX_NAME_BYTES])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
    with suppress(OSError):
        if address := _ipv6_address(name, Path("/proc/net/if_inet6").read_text()):
            return address
    raise _refused(f"the interface {name} has no address that other machines can use (`ip addr show {name}`)")


def _ipv6_address(name: str, table: str) -> str:
    """Return the first global permanent address of an interface in a table of the form of /proc/net/if_inet6; empty if
    there is none."""
    for line in table.splitlines():
        digits, _, _, scope, flags, interface = line.split()
        if interface == name and scope == _GLOBAL_SCOPE and int(flags, 16) & _PERMANENT:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""


def _bridges(link: Path) -> tuple[str, ...]:
    """Return the parts of the path of a PCI device above the device itself. Raises OSError where it does not exist."""
    return link.resolve(strict=True).parent.parts


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _refused(problem: str) -> TandemError:
    return TandemError(ErrorKind.UNSUPPORTED, problem, param=_SETTING)
