"""Reads what this machine has counted on its networks; never concludes anything from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.transfer.link_detection import Counters

_PORT_WORD_BYTES = 4
"""`port_rcv_data` counts these (InfiniBand specification, PortCounters), for RoCE too."""
_BYTE_COUNTERS = ("rx_bytes", "rdma_read_bytes")
"""Of adapters that are no InfiniBand ports, as EFA: messages, and what was read of others."""


def read_counters(at: float, root: Path = Path("/")) -> Counters:
    """What there is of them: a container may see no RDMA ports, and sees the interfaces of its own network."""
    return Counters(at, dict(_rdma(root / "sys/class/infiniband")), dict(_network(root / "proc/net/dev")))


def _rdma(ports: Path) -> Iterator[tuple[str, int]]:
    for port in sorted(ports.glob("*/ports/*")):
        words = _number(port / "counters/port_rcv_data")
        others = [_number(port / "hw_counters" / name) for name in _BYTE_COUNTERS]
        yield f"{port.parent.parent.name}/{port.name}", max(words * _PORT_WORD_BYTES, sum(others))


def _network(table: Path) -> Iterator[tuple[str, int]]:
    """Lines of `name: received bytes, packets, ...`, below two lines of headings."""
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
