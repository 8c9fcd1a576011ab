"""All that a mover decides, one turn at a time: the one user of its transport; owns no thread and never waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.ids import Incarnation, WorkerId
from tandem.engine.ports import PeerError, ReadState, TransportPeer
from tandem.engine.transfer_messages import (
    Cancel,
    Command,
    Connected,
    ConnectFailed,
    ConnectPeer,
    Event,
    FailureKind,
    PeerDrained,
    PeerLost,
    ReadFailed,
    ReadRequest,
    SelfTest,
    SelfTestDone,
    SetPolling,
    TearDownPeer,
    TransferStopped,
)
from tandem.transfer.digest_checks import Checks, Digest, DigestCheck
from tandem.transfer.peer_layout import CopyRefused
from tandem.transfer.read_task import ReadPart, ReadTask, split
from tandem.transfer.transport import Transport

Life = tuple[WorkerId, Incarnation]


@dataclass(slots=True)
class _Test:
    handle: int
    started: float


class TransferEngine:
    """Orders in, events out. Each accepted order is reported exactly once, whatever its peer does.

    A turn posts at most one part and checks at most one, because either may take as long as a copy of these bytes,
    and peers that read from us wait for our polling. `is_helped`: another thread works on `checks` too, so that a turn
    checks only when it has nothing to read.
    """

    def __init__(
        self, transport: Transport, digest: Digest, clock: Clock, max_post_bytes: int, *, is_helped: bool = False
    ) -> None:
        self.checks = Checks(digest, transport.pool.heads)
        self._transport = transport
        self._is_helped = is_helped
        self._clock = clock
        self._max_post_bytes = max_post_bytes
        self._peers: dict[Life, TransportPeer] = {}
        self._lingering: dict[Life, TransportPeer] = {}
        self._newest: dict[WorkerId, Incarnation] = {}
        self._readings: dict[int, ReadTask] = {}
        self._turns: deque[int] = deque()
        self._arrived: deque[DigestCheck] = deque()
        self._test: _Test | None = None
        self._leases_open = False
        self._events: list[Event] = []

    def __repr__(self) -> str:
        open_parts = sum(len(reading.open) for reading in self._readings.values())
        return (
            f"Carrier({len(self._readings)} orders, {open_parts} parts open, "
            f"{len(self._peers)} peers, {len(self._lingering)} lingering)"
        )

    @property
    def is_busy(self) -> bool:
        """Bytes move, or may be asked of us at any moment."""
        return self._leases_open or bool(self._readings) or self._test is not None

    @property
    def has_ready_work(self) -> bool:
        """The next turn has something to do that waits for nobody."""
        may_check = bool(self._arrived) or self.checks.may_work
        return may_check or any(reading.may_post for reading in self._readings.values())

    @property
    def is_drained(self) -> bool:
        """No read of ours is under way anywhere, and no check."""
        is_checking = bool(self._arrived) or self.checks.num_open > 0
        return not (self._lingering or is_checking or any(reading.open for reading in self._readings.values()))

    def accept(self, command: Command) -> None:
        match command:
            case ReadRequest():
                self._accept_order(command)
            case ConnectPeer(peer):
                self._connect(peer)
            case Cancel(id):
                if id in self._readings:
                    self._readings[id].fail(FailureKind.CANCELLED, "cancelled")
            case TearDownPeer(peer, reason):
                self._tear_down(peer, reason)
            case SelfTest():
                self._start_self_test()
            case SetPolling(busy):
                self._leases_open = busy

    def turn(self) -> list[Event]:
        """Move everything on by one beat. Returns what happened since the last turn, in order."""
        if self._readings or self._arrived or self.checks.num_open:
            self._check_arrived()
            self._post_next()
            self._poll_open()
            self._report_finished()
        self._poll_self_test()
        self._prove_lingering()
        self._transport.progress()
        return self._take_events()

    def cancel_all(self, reason: str) -> None:
        """Post nothing more. What is open is still waited for, turn by turn, until `is_drained`."""
        for reading in self._readings.values():
            reading.fail(FailureKind.STOPPED, reason)

    def close(self, error: str | None = None) -> list[Event]:
        """Close the transport, report every open order, and end with MoverStopped."""
        try:
            self._transport.close()
            drained = True
        except Exception as failure:
            # Whatever it is, every order is still owed its report.
            drained, error = False, error or str(failure)
        reason = error or "the transfer thread was stopped"
        for reading in self._readings.values():
            safe = drained or not reading.open
            self._events.append(ReadFailed(reading.order.id, FailureKind.STOPPED, reason, safe))
        self._readings.clear()
        if self._test is not None:
            self._end_self_test(reason)
        if drained:
            self._events.extend(PeerDrained(peer) for peer in self._lingering.values())
            self._lingering.clear()
        self._peers.clear()
        self._events.append(TransferStopped(error))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Orders

    def _accept_order(self, order: ReadRequest) -> None:
        """A second order under an open id is the first one sent twice: it is reported once."""
        if order.id in self._readings:
            return
        if self._peers.get(order.peer.life) != order.peer:
            reason = f"{order.peer.worker} is not connected"
            self._events.append(ReadFailed(order.id, FailureKind.REFUSED, reason, drained=True))
            return
        block_bytes = self._transport.pool.block_bytes
        parts = deque(split(order, block_bytes, self._max_post_bytes))
        self._readings[order.id] = ReadTask(order, block_bytes, self._clock.now(), parts)
        self._turns.append(order.id)

    def _post_next(self) -> None:
        """One part of the order that has waited longest for its turn."""
        for _ in range(len(self._turns)):
            id = self._turns.popleft()
            reading = self._readings.get(id)
            if reading is None or not reading.waiting:
                continue
            self._turns.append(id)
            if reading.may_post:
                self._post(reading, reading.waiting.popleft())
                return

    def _post(self, reading: ReadTask, part: ReadPart) -> None:
        peer = reading.order.peer
        try:
            handle = self._transport.post_read(peer, reading.copies(part))
        except CopyRefused as error:
            reading.fail(FailureKind.REFUSED, str(error))
        except PeerError as error:
            # Of this part nothing may be open; `disconnect` knows, and decides what is drained.
            self._disconnect_peer(peer, FailureKind.PEER, str(error), failed_post=reading.order.id)
        else:
            reading.open[handle] = part

    def _poll_open(self) -> None:
        for id, reading in list(self._readings.items()):
            for handle, part in list(reading.open.items()):
                if id in self._readings:
                    self._poll(reading, handle, part)

    def _poll(self, reading: ReadTask, handle: int, part: ReadPart) -> None:
        peer = reading.order.peer
        try:
            state = self._transport.poll(handle)
        except PeerError as error:
            self._disconnect_peer(peer, FailureKind.PEER, str(error))
            return
        if state is ReadState.PENDING:
            return
        del reading.open[handle]
        if state is ReadState.FAILED:
            self._disconnect_peer(peer, FailureKind.PEER, f"{peer.worker} is gone: a read of it failed")
        elif reading.failure is None and reading.order.digests is not None:
            reading.num_checking += 1
            self._arrived.append(DigestCheck(reading, part))

    def _check_arrived(self) -> None:
        """Just before a post: the helper, once woken, needs the interpreter's lock, which is free from the post on."""
        is_reading = any(reading.open or reading.may_post for reading in self._readings.values())
        if self._is_helped and is_reading:
            while self._arrived:
                self.checks.share(self._arrived.popleft())
        elif self._arrived:
            self.checks.do(self._arrived.popleft())
        else:
            self.checks.work()
        for check in self.checks.take():
            reading, order = check.reading, check.reading.order
            reading.num_checking -= 1
            if check.wrong is not None:
                block, index = order.copies[check.wrong].remote, order.logical[check.wrong]
                reason = f"block {block} of {order.peer.worker} (prompt block {index}) is another"
                reading.fail(FailureKind.DIGEST, reason)

    def _report_finished(self) -> None:
        for id, reading in list(self._readings.items()):
            if reading.is_over:
                del self._readings[id]
                self._events.append(reading.report(self._clock.now()))

    # Peers

    def _connect(self, peer: TransportPeer) -> None:
        if self._peers.get(peer.life) == peer:
            self._events.append(Connected(peer))
            return
        if peer.worker.incarnation < self._newest.get(peer.worker.id, peer.worker.incarnation):
            self._events.append(ConnectFailed(peer, f"{peer.worker} has a newer incarnation"))
            return
        self._newest[peer.worker.id] = peer.worker.incarnation
        for other in list(self._peers.values()):
            if other.worker.id == peer.worker.id:
                self._disconnect_peer(other, FailureKind.PEER, f"{other.worker} connects anew")
        try:
            self._transport.connect(peer)
        except PeerError as error:
            self._events.append(ConnectFailed(peer, str(error)))
        else:
            self._peers[peer.life] = peer
            self._events.append(Connected(peer))

    def _tear_down(self, peer: TransportPeer, reason: str) -> None:
        if peer.life in self._lingering:
            return
        known = self._peers.get(peer.life)
        if known is None:
            self._events.append(PeerLost(peer, True, reason))
        else:
            self._disconnect_peer(known, FailureKind.TEARDOWN, reason)

    def _disconnect_peer(
        self, peer: TransportPeer, kind: FailureKind, reason: str, failed_post: int | None = None
    ) -> None:
        """Disconnect a peer and report all its orders; `failed_post` is one that may have an open part unseen."""
        del self._peers[peer.life]
        proven = self._transport.disconnect(peer)
        for id, reading in list(self._readings.items()):
            if reading.order.peer.life == peer.life:
                del self._readings[id]
                reading.fail(kind, reason)
                safe = proven or not (reading.open or id == failed_post)
                first_kind, first_reason = reading.failure or (kind, reason)
                self._events.append(ReadFailed(id, first_kind, first_reason, safe))
        if not proven:
            self._lingering[peer.life] = peer
        self._events.append(PeerLost(peer, proven, reason))

    def _prove_lingering(self) -> None:
        for life, peer in list(self._lingering.items()):
            if self._transport.disconnect(peer):
                del self._lingering[life]
                self._events.append(PeerDrained(peer))

    # Self-test

    def _start_self_test(self) -> None:
        """One at a time; a second command while one runs is answered with the first."""
        if self._test is not None:
            return
        started = self._clock.now()
        try:
            self._test = _Test(self._transport.post_self_test(), started)
        except PeerError as error:
            self._events.append(SelfTestDone(str(error), self._clock.now() - started))

    def _poll_self_test(self) -> None:
        if self._test is None:
            return
        try:
            state = self._transport.poll(self._test.handle)
        except PeerError as error:
            self._end_self_test(str(error))
            return
        if state is not ReadState.PENDING:
            self._end_self_test(None if state is ReadState.DONE else "the bytes did not arrive intact")

    def _end_self_test(self, error: str | None) -> None:
        assert self._test is not None
        self._events.append(SelfTestDone(error, self._clock.now() - self._test.started))
        self._test = None
