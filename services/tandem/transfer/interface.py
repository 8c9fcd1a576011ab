"""Define the two interfaces of a KV transfer: `Transport`, which moves bytes for the one thread that owns it, and
`KVTransfer`, which carries out commands for a whole worker or one of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem.core.ids import BlockId, WorkerRef
from tandem.engine.transfer_messages import Command, Event, TransportPeer
from tandem.transfer.memory_pool import MemoryPool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Read the peer's block `remote` into the local block `local`: all heads that the local pool holds of it."""

    remote: BlockId
    local: BlockId


class ReadState(Enum):
    """State of a read. FAILED means that the transport has proven that the read does not touch local memory any
    more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class PeerError(Exception):
    """Raised when the peer is gone, refuses the connection, or is another incarnation than before."""


class Transport(Protocol):
    """Read blocks of peers' pools into the local pool. All calls come from the one thread that owns the transport.

    No worker writes into another worker's memory. A read cannot be aborted: memory is safe to reuse only once `poll`
    returned DONE or FAILED, `disconnect` returned True, or `close` returned.
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

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Return the local side of the handshake."""
        ...

    def connect(self, peer: TransportPeer) -> None:
        """Make a peer readable; an earlier incarnation under the same worker id is dropped first.

        Raises PeerError when the peer cannot be reached or its layout cannot be read.
        """
        ...

    def disconnect(self, peer: TransportPeer) -> bool:
        """Tear down a peer with all its reads; return True if it is proven that none of them touches local memory any
        more.

        It may be called again until it returns True. Until then the peer accepts no new reads, and its open reads still
        make progress.
        """
        ...

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> int:
        """Start a read and return its handle. May block as long as a copy of these bytes takes. Raises PeerError."""
        ...

    def post_self_test(self) -> int:
        """Start a read of a few bytes of the transport's own memory, not of the pool, and return its handle.

        The handle is polled like that of a read: FAILED when the bytes did not arrive intact. Raises PeerError.
        """
        ...

    def poll(self, handle: int) -> ReadState:
        """Progress one read and return its state; the handle is invalid after DONE or FAILED.

        Raises PeerError when a read failed without proof that it no longer writes to local memory.
        """
        ...

    def progress(self) -> None:
        """Serve peers that read from this worker; called at least every 20 ms, every 0.5 ms while a lease or read is
        open."""
        ...

    def close(self) -> None: ...


class KVTransfer(Protocol):
    """Accept commands from any thread and carry them out in order, over one rank or all ranks of a worker.

    Events go, in order, to the `on_event` that the transfer was opened with. TransferStopped is the last one.
    """

    def start(self) -> None: ...

    def send(self, command: Command) -> None:
        """Queue a command without waiting. Raises RuntimeError after a halt or failure, when no event would answer."""
        ...

    def halt(self) -> None:
        """Begin to stop, whether started or not: open reads end, then the transport is closed. Returns at once."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the transfer thread. Returns False when the thread is still running after `timeout_s`."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Halt, then wait. Returns False when the thread is still running after `timeout_s`."""
        self.halt()
        return self.join(timeout_s)


OpenKVTransfer = Callable[[Callable[[Event], None]], KVTransfer]
"""`open(on_event)` returns a transfer that is not started. `on_event` must not block; any thread may call it."""
