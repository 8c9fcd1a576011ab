"""What may be asked of a mover, be it one rank's or several joined; moves nothing itself."""

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
    """Commands from any thread, in order; their answers, in order, to whom it was made with, MoverStopped last."""

    def start(self) -> None: ...

    def send(self, command: Command) -> None:
        """Never waits. Raises RuntimeError once it was halted or has failed: then nothing would ever answer."""
        ...

    def halt(self) -> None:
        """Let open reads end, then close the transport and end, started or not. Returns at once."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end. False when it hangs."""
        ...


OpenMover = Callable[[Callable[[Event], None]], RankTransfer]
"""`open(on_event)`: a mover that is not started yet. `on_event` never waits, and may be called from any thread."""


class KVTransfer(RankTransfer, Protocol):
    """A command for each verb."""

    def connect(self, peer: TransportPeer) -> None:
        """Answered by Connected or ConnectFailed."""
        self.send(ConnectPeer(peer))

    def read(self, order: ReadRequest) -> None:
        """Answered by exactly one ReadDone or ReadFailed."""
        self.send(order)

    def cancel(self, id: int) -> None:
        """Lets an order end early; it is still answered once."""
        self.send(Cancel(id))

    def teardown(self, peer: TransportPeer, reason: str) -> None:
        """Answered by a report of each of the peer's orders and PeerLost; by PeerDrained if the proof comes later."""
        self.send(TearDownPeer(peer, reason))

    def self_test(self) -> None:
        """Answered by SelfTestDone. No answer within seconds means that a thread hangs in a transport call."""
        self.send(SelfTest())

    def set_busy(self, busy: bool) -> None:
        """Whether leases are open here: peers that read over TCP move only as often as we poll."""
        self.send(SetPolling(busy))

    def stop(self, timeout_s: float) -> bool:
        """Halt and wait. False when it hangs."""
        self.halt()
        return self.join(timeout_s)
