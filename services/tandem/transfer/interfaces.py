"""Define the calls of a KV transfer, of one rank or of all ranks of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tandem.engine.ports import TransportPeer
from tandem.engine.transfer_messages import (
    Cancel,
    Command,
    ConnectPeer,
    Event,
    ReadRequest,
    SelfTest,
    SetPolling,
    TearDownPeer,
)


class RankTransfer(Protocol):
    """Accept commands from any thread and carry them out in order.

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


OpenRankTransfer = Callable[[Callable[[Event], None]], RankTransfer]
"""`open(on_event)` returns a transfer that is not started. `on_event` must not block; any thread may call it."""


class KVTransfer(RankTransfer, Protocol):
    """Offer one method for each command of a KV transfer."""

    def connect(self, peer: TransportPeer) -> None:
        """Make the blocks of `peer` readable. Connected or ConnectFailed answers."""
        self.send(ConnectPeer(peer))

    def read(self, request: ReadRequest) -> None:
        """Read and check blocks of a peer. Exactly one ReadDone or ReadFailed answers."""
        self.send(request)

    def cancel(self, id: int) -> None:
        """End read request `id` early. One ReadDone or ReadFailed still answers the request."""
        self.send(Cancel(id))

    def teardown(self, peer: TransportPeer, reason: str) -> None:
        """Disconnect a peer and fail its reads.

        ReadFailed answers for each of its requests, then PeerLost. PeerDrained follows when some read was not proven
        to have ended and the proof arrives later.
        """
        self.send(TearDownPeer(peer, reason))

    def self_test(self) -> None:
        """Move a few bytes through the transport. SelfTestDone answers.

        No answer within seconds means that a thread hangs in a transport call.
        """
        self.send(SelfTest())

    def set_busy(self, busy: bool) -> None:
        """Poll often while leases are open here: a peer's TCP read from this worker advances only when polled here."""
        self.send(SetPolling(busy))

    def stop(self, timeout_s: float) -> bool:
        """Halt, then wait. Returns False when the thread is still running after `timeout_s`."""
        self.halt()
        return self.join(timeout_s)
