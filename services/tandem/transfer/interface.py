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
    """Name one block that a read copies: from block `remote` of the peer's pool to block `local` of this rank's pool.

    Only the KV heads that the local pool holds are copied.
    """

    remote: BlockId
    local: BlockId


class ReadState(Enum):
    """Name the state of a read. PENDING: it is still open. DONE: all bytes are in local memory. FAILED: the read has
    failed, and the transport has proof that it no longer writes to local memory."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class PostedRead(Protocol):
    """Represent a read that a transport has begun."""

    def poll(self) -> ReadState:
        """Make progress on the read and return its state. Must not be called again after DONE or FAILED.

        Raises PeerError when the read failed without proof that it no longer writes to local memory.
        """
        ...


class PeerError(Exception):
    """Raised when a peer (another worker whose memory this one reads) is gone, refuses the connection, or has restarted
    as another incarnation."""


class Transport(Protocol):
    """Read blocks of peers' pools into the local pool.

    Once `enter_thread` was called, only the thread that called it uses the transport, except for `describe`. No worker
    writes into another worker's memory. A read cannot be aborted: its local blocks are safe to reuse only once its
    `poll` returned DONE or FAILED, `disconnect` returned True, or `close` returned.
    """

    @property
    def pool(self) -> MemoryPool:
        """Return the local KV pool into which reads write; it has this rank's KV heads of every block."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread to use the transport; from then on no other thread may use it.

        Another thread may have created the transport.
        """
        ...

    def describe(self, worker: WorkerRef) -> TransportPeer:
        """Return what other workers need to connect to this transport and read its pool. `worker`: identity of this
        worker, which the description contains."""
        ...

    def connect(self, peer: TransportPeer) -> None:
        """Connect to a peer, so that its blocks can be read. The caller has disconnected what was connected under the
        same worker id.

        Raises PeerError when the peer cannot be reached, its layout does not fit, or `disconnect` of the same
        incarnation has not returned True yet.
        """
        ...

    def disconnect(self, peer: TransportPeer) -> bool:
        """Tear down a peer with all reads from it, and return whether these reads have all stopped writing to local
        memory.

        If the result is False, the caller may call again until it is True. Until then the peer accepts no new reads,
        and its open reads still make progress. Returns True for a peer that is not connected.
        """
        ...

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        """Start a read of `copies` from a connected peer and return it. May block as long as a copy of these bytes
        takes. Raises PeerError when the peer is not connected or cannot be read, and its subclass
        CopyRefused for a block that does not exist."""
        ...

    def post_self_test(self) -> PostedRead:
        """Start a read of a few bytes of the transport's own memory, outside the pool, and return it.

        Its `poll` returns FAILED when the bytes did not arrive intact. Raises PeerError when the read cannot be
        started.
        """
        ...

    def progress(self) -> None:
        """Answer peers that are reading from this worker. The owner must call it at least every 20 ms, and every 0.5 ms
        while a lease or a read is open."""
        ...

    def close(self) -> None: ...


class KVTransfer(Protocol):
    """Carry out commands (connect a peer, read, cancel, tear down) in order, on one rank or on all ranks of a worker.

    Any thread may send commands. Results go, in order, as events to the `on_event` that the transfer was opened with.
    The last event is TransferStopped.
    """

    def start(self) -> None: ...

    def send(self, command: Command) -> None:
        """Queue a command and return without waiting for it. Raises RuntimeError once the transfer was halted or has
        failed, because no event would report the result."""
        ...

    def halt(self) -> None:
        """Begin to stop, and return without waiting: open reads end, then the transport is closed.

        Also works on a transfer that was not started; a second call does nothing.
        """
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait until the transfer has ended. Returns False when it is still running after `timeout_s` seconds."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Halt the transfer and wait until it has ended. Returns False when it is still running after `timeout_s`
        seconds."""
        self.halt()
        return self.join(timeout_s)


OpenKVTransfer = Callable[[Callable[[Event], None]], KVTransfer]
"""`open(on_event)` returns a transfer that is not started. `on_event` must not block; any thread may call it."""
