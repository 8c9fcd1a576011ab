"""Infer the type of a link between two workers from the network counters before and after a read.

Neither NIXL nor UCX reports which transport carried a read: `query_xfer_backend` says UCX, its telemetry counts bytes
and time, and the log line in which UCX names its choice is meant for people. The counters do show it: TCP traffic, over
loopback too, raises the counters of network interfaces; RDMA bypasses the kernel and raises only those of RDMA ports.
TCP over InfiniBand raises both, so network interfaces are checked first. Where a driver counts RoCE traffic in its
interface's statistics too, RDMA is reported as TCP, which is better than a report of RDMA where there is none.

`read_counters` reads the counters of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.core.link import LinkType

_MIN_FRACTION = 0.9
"""Least fraction of the bytes read that a set of counters must have risen by to prove the link type.

Headers make the rise larger than the read, statistics that lag behind make it a little smaller.
"""


@dataclass(frozen=True, slots=True)
class Counters:
    """Hold how many bytes this machine has received since boot: over each RDMA port (`rdma`, by name) and over each
    network interface (`network`, by name). `at`: time at which they were read, by the caller's clock in seconds."""

    at: float
    rdma: Mapping[str, int]
    network: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """Describe the two ends of a read: the reading worker and the source.

    `transport`: value of transfer.backend. `same_machine`: whether both processes run under one kernel, even in
    different containers. `device`, `source_device`: where the memory of reader and source is, `cpu` or `cuda:N`.
    """

    transport: str
    same_machine: bool
    device: str
    source_device: str

    @property
    def is_cuda(self) -> bool:
        """Return whether both ends are GPU memory."""
        return all(device.startswith("cuda") for device in (self.device, self.source_device))


def detect_link_type(
    num_bytes: int, idle: Counters, before: Counters, after: Counters, ends: LinkEndpoints
) -> tuple[LinkType, str]:
    """Infer the type of the link over which `num_bytes` bytes were read between `ends`, from the network counters of
    this machine.

    `before`, `after`: taken at the start and at the end of the read. `idle`: taken earlier than `before`. None of the
    read's bytes moved between `idle` and `before`, so the rise in that interval shows the background traffic. Returns
    the type, which is "unknown" if the counters do not show it, and a sentence for people with the figures from which
    it was inferred.
    """
    if ends.transport == "local":
        return "shared_memory", "the local transport reads the other process's memory"
    if ends.transport == "tcp":
        return "tcp", "the TCP transport has connections of its own"
    network, rdma = (_risen(idle, before, after, kind) for kind in ("network", "rdma"))
    rose = f"of {_mb(num_bytes)} read, network interfaces received {_named(network)}, RDMA ports {_named(rdma)}"
    enough = _MIN_FRACTION * num_bytes
    if sum(network.values()) >= enough:
        return "tcp", rose
    if sum(rdma.values()) >= enough:
        return "rdma", rose
    if not ends.same_machine:
        return "unknown", f"{rose}, and the source is on another machine"
    if ends.is_cuda:
        return "cuda_ipc", f"{rose}; GPU memory of one machine"
    return "shared_memory", f"{rose}; one machine"


def _risen(idle: Counters, before: Counters, after: Counters, kind: str) -> dict[str, float]:
    """Return by how many bytes each counter of `kind` rose, minus its background rate over the same time."""
    usual, began, ended = (getattr(counters, kind) for counters in (idle, before, after))
    idle_s = before.at - idle.at
    times = (after.at - before.at) / idle_s if idle_s > 0 else 0.0
    risen: dict[str, float] = {}
    for name in began.keys() & ended.keys():
        background = max(0, began[name] - usual.get(name, began[name])) * times
        risen[name] = max(0.0, ended[name] - began[name] - background)
    return risen


def _named(risen: Mapping[str, float]) -> str:
    if not risen:
        return "nothing: there are none"
    most = max(risen, key=lambda name: risen[name])
    return f"{_mb(sum(risen.values()))} ({most} most)" if risen[most] >= 1 else "nothing"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


_PORT_WORD_BYTES = 4
"""Unit of `port_rcv_data`, in bytes (InfiniBand specification, PortCounters); the same for RoCE."""
_BYTE_COUNTERS = ("rx_bytes", "rdma_read_bytes")
"""Byte counters of adapters that are not InfiniBand ports, such as EFA: received messages, and RDMA reads."""


def read_counters(at: float, root: Path = Path("/")) -> Counters:
    """Return the byte counters that this process can see at the time `at`, in seconds of the caller's clock. A
    container sees its own interfaces, and perhaps no RDMA ports. Counters that cannot be read are left out or 0.

    `root`: directory under which `sys` and `proc` are found.
    """
    return Counters(at, dict(_rdma(root / "sys/class/infiniband")), dict(_network(root / "proc/net/dev")))


def _rdma(ports: Path) -> Iterator[tuple[str, int]]:
    for port in sorted(ports.glob("*/ports/*")):
        words = _number(port / "counters/port_rcv_data")
        others = [_number(port / "hw_counters" / name) for name in _BYTE_COUNTERS]
        yield f"{port.parent.parent.name}/{port.name}", max(words * _PORT_WORD_BYTES, sum(others))


def _network(table: Path) -> Iterator[tuple[str, int]]:
    """Yield name and received bytes of each interface in a file of the form of `/proc/net/dev`.

    Two heading lines are followed by lines `name: received bytes, packets, ...`.
    """
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, numbers = line.partition(":")
        received = numbers.split()
        if received and received[0].isdigit():
            yield name.strip(), int(received[0])


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
