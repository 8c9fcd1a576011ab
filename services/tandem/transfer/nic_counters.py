"""Read the received-byte counters of this machine's network interfaces and RDMA ports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.transfer.link_detection import Counters

_PORT_WORD_BYTES = 4
"""Unit of `port_rcv_data`, in bytes (InfiniBand specification, PortCounters); the same for RoCE."""
_BYTE_COUNTERS = ("rx_bytes", "rdma_read_bytes")
"""Byte counters of adapters that are not InfiniBand ports, such as EFA: received messages, and RDMA reads."""


def read_counters(at: float, root: Path = Path("/")) -> Counters:
    """Return the counters that are visible here; a container sees its own interfaces, and perhaps no RDMA ports.

    `at`: time of the reading by the caller's clock, in seconds. `root`: where `/sys` and `/proc` are found.
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
