"""Open the transport that the settings name."""

from __future__ import annotations

from collections.abc import Callable

from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport

OpenTransport = Callable[[str, MemoryPool, str], Transport]
"""Signature of a transport factory: `open(kind, pool, agent)`."""


def open_transport(kind: str, pool: MemoryPool, agent: str) -> Transport:
    """Open the NIXL transport, or for any other kind the `process_vm_readv` transport. Raises TandemError when this
    machine does not support it."""
    return NixlTransport(pool, agent) if kind == "nixl" else ProcessVmTransport(pool, agent)
