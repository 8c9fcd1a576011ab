"""List the TCP sockets on which processes listen, from /proc, which needs no external tool."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTEN = "0A"
"""The state of a listening socket in /proc/PID/net/tcp."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket on which the process `pid` accepts connections at `address`."""

    address: IPv4Address | IPv6Address
    port: int
    pid: int

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the socket."""
        mapped = getattr(self.address, "ipv4_mapped", None)
        return (mapped or self.address).is_loopback

    @property
    def reached_at(self) -> tuple[str, int]:
        """Return an address of this machine at which the socket is reached."""
        if self.address.is_unspecified:
            return ("127.0.0.1" if self.address.version == 4 else "::1", self.port)
        return str(self.address), self.port


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Return the listening TCP sockets of the processes, once for each process that holds one."""
    return [found for pid in pids for found in _of_process(pid)]


def _of_process(pid: int) -> Iterator[Listener]:
    own = set()
    with suppress(OSError):  # the process has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                own.add(str(entry.readlink()))
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                    host, _, port = fields[1].partition(":")
                    yield Listener(_address(host), int(port, 16), pid)


def _address(digits: str) -> IPv4Address | IPv6Address:
    """Return the address that the kernel prints as 32-bit words in the machine's byte order."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return ip_address(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed))
