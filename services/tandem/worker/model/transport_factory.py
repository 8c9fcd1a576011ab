"""Opens the transport that settings name; never reads through it."""

from __future__ import annotations

from collections.abc import Callable

from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.transport import Transport

OpenTransport = Callable[[str, MemoryPool, str], Transport]
"""`open(kind, pool, agent)`"""


def open_transport(kind: str, pool: MemoryPool, agent: str) -> Transport:
    """Raises TandemError when this machine cannot have it."""
    return NixlTransport(pool, agent) if kind == "nixl" else ProcessVmTransport(pool, agent)
