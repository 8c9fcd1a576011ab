"""Define the calls that the transfer engine needs of a transport beyond the `KVTransport` of the engine room."""

from __future__ import annotations

from typing import Protocol

from tandem.engine.ports import KVTransport
from tandem.transfer.memory_pool import MemoryPool


class Transport(KVTransport, Protocol):
    """A KVTransport with stronger guarantees about the memory under its reads.

    `disconnect` may be called again until it returns True. Until then some read is not proven to have ended: the peer
    accepts no new reads, and its open reads still make progress. `poll` raises PeerError when a read failed without
    proof that it no longer writes to local memory. After `close` returns, no read writes to local memory.
    """

    @property
    def pool(self) -> MemoryPool:
        """Return the pool that reads write to, with this rank's heads of every block."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is the only one to use the transport from then on.

        Another thread may have created the transport.
        """
        ...

    def post_self_test(self) -> int:
        """Start a read of a few bytes of the transport's own memory, not of the pool, and return its handle.

        The handle is polled like that of a read: FAILED when the bytes did not arrive intact. Raises PeerError.
        """
        ...
