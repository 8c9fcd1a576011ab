"""Test the transfer thread: commands arrive in order, events come back, and every order is answered at an end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from tandem.core.clock import SystemClock
from tandem.core.ids import BlockId, WorkerRef
from tandem.engine.effects import TearDownPeer
from tandem.engine.transfer_messages import (
    Cancel,
    Connected,
    ConnectPeer,
    Event,
    FailureKind,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
    SelfTest,
    SelfTestDone,
    SetPolling,
    TransferStopped,
    TransportPeer,
)
from tandem.transfer import transfer_thread as transfer_thread_module
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState
from tandem.transfer.transfer_thread import TransferThread
from tests.memory_pools import memory_pool
from tests.unit.transfer import scripted
from tests.unit.transfer.scripted import BLOCK_BYTES, LAYOUT, P, order

GUARD_S = 30.0
"""Only ends a test that hangs."""


class SteppedRead:
    def __init__(self, transport: SteppedTransport) -> None:
        self._transport = transport

    def poll(self) -> ReadState:
        self._transport._called()
        return ReadState.DONE if self._transport.finish.is_set() else ReadState.PENDING


class SteppedTransport:
    """Reads end when the test says so; records which threads call it."""

    pool = memory_pool(4096, 100, LAYOUT)

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.finish = threading.Event()
        self.crash = False
        self.closed = False
        self.num_reads = 0
        self.num_entered = 0

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)

    def describe(self, worker: WorkerRef) -> TransportPeer:
        return P

    def connect(self, peer: TransportPeer) -> None:
        self._called()

    def disconnect(self, peer: TransportPeer) -> bool:
        self._called()
        return self.finish.is_set()

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        self._called()
        self.num_reads += 1
        return SteppedRead(self)

    def progress(self) -> None:
        self._called()
        if self.crash:
            raise RuntimeError("the library broke")

    def enter_thread(self) -> None:
        self._called()
        self.num_entered += 1

    def post_self_test(self) -> PostedRead:
        self._called()
        if self.finish.is_set():
            return SteppedRead(self)
        raise PeerError("not yet")

    def close(self) -> None:
        self._called()
        self.closed = True


@pytest.fixture
def transport() -> SteppedTransport:
    return SteppedTransport()


@pytest.fixture
def events() -> queue.SimpleQueue[Event]:
    return queue.SimpleQueue()


@pytest.fixture
def transfer(transport: SteppedTransport, events: queue.SimpleQueue[Event]) -> Iterator[TransferThread]:
    transfer = TransferThread(transport, lambda blocks, logical: [], events.put, SystemClock())
    transfer.start()
    yield transfer
    assert transfer.stop(GUARD_S)


def take(events: queue.SimpleQueue[Event]) -> Event:
    return events.get(timeout=GUARD_S)


def test_only_the_transfer_thread_touches_the_transport(transfer, transport, events) -> None:
    transfer.send(ConnectPeer(P))
    assert take(events) == Connected(P)
    transfer.send(SetPolling(True))
    transfer.send(order(1))
    transfer.send(order(2))
    transfer.send(Cancel(2))
    transport.finish.set()
    done = {event.id: event for event in (take(events), take(events))}
    assert isinstance(done[1], ReadDone)
    assert isinstance(done[2], ReadFailed)
    transfer.send(SelfTest())
    tested = take(events)
    assert isinstance(tested, SelfTestDone)
    assert tested.error is None
    assert transfer.stop(GUARD_S)
    assert take(events) == TransferStopped(None)
    assert transport.threads == {"tandem-transfer"}
    assert transport.num_entered == 1


def test_a_teardown_is_answered_while_the_read_hangs(transfer, transport, events) -> None:
    transfer.send(ConnectPeer(P))
    transfer.send(order(1))
    until_posted(transport)
    transfer.send(TearDownPeer(P.worker, "deadline"))
    assert [take(events) for _ in range(3)] == [
        Connected(P),
        ReadFailed(1, FailureKind.TEARDOWN, "deadline", drained=False),
        PeerLost(P, False, "deadline"),
    ]
    transport.finish.set()
    assert take(events) == PeerDrained(P)


def test_stop_waits_for_open_reads_and_answers_them(transfer, transport, events) -> None:
    transfer.send(ConnectPeer(P))
    transfer.send(order(1))
    assert take(events) == Connected(P)
    until_posted(transport)
    timer = threading.Timer(0.05, transport.finish.set)
    timer.start()
    assert transfer.stop(GUARD_S)
    timer.join()
    event = take(events)
    assert isinstance(event, ReadFailed)
    assert (event.kind, event.drained) == (FailureKind.STOPPED, True)
    assert take(events) == TransferStopped(None)


def test_stop_does_not_wait_for_ever(transfer, transport, events, monkeypatch) -> None:
    monkeypatch.setattr(transfer_thread_module, "DRAIN_TURNS", 3)
    transfer.send(ConnectPeer(P))
    transfer.send(order(1))
    until_posted(transport)
    assert transfer.stop(GUARD_S)
    assert transport.closed
    assert take(events) == Connected(P)
    event = take(events)
    assert isinstance(event, ReadFailed)
    assert event.drained, "closing the transport is the proof"
    with pytest.raises(RuntimeError, match="stopped"):
        transfer.send(order(2))


def test_a_transport_that_breaks_ends_the_transfer_thread_loudly_and_answers_everything(
    transfer, transport, events
) -> None:
    transfer.send(ConnectPeer(P))
    transfer.send(order(1))
    until_posted(transport)
    transport.crash = True
    assert take(events) == Connected(P)
    failed = take(events)
    assert isinstance(failed, ReadFailed)
    assert (failed.id, failed.kind) == (1, FailureKind.STOPPED)
    stopped = take(events)
    assert isinstance(stopped, TransferStopped)
    assert stopped.error is not None
    assert "the library broke" in stopped.error
    with pytest.raises(RuntimeError, match="stopped"):
        transfer.send(ConnectPeer(P))


def test_a_part_is_checked_while_the_next_one_is_copied_inside_its_post(transport, events, monkeypatch) -> None:
    """The second post waits for the first digest: without a helper this would hang."""
    checked = threading.Event()
    helpers: list[str] = []

    def digest(blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
        helpers.append(threading.current_thread().name)
        checked.set()
        return scripted.digest(blocks, logical)

    def post_read(peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        transport.num_reads += 1
        if transport.num_reads == 2:
            assert checked.wait(GUARD_S)
        return SteppedRead(transport)

    monkeypatch.setattr(transport, "post_read", post_read)
    transport.finish.set()
    transfer = TransferThread(transport, digest, events.put, SystemClock(), max_post_bytes=BLOCK_BYTES)
    transfer.start()
    transfer.send(ConnectPeer(P))
    transfer.send(order(1, num_blocks=2, digests=True))
    assert take(events) == Connected(P)
    assert isinstance(take(events), ReadDone)
    assert transfer.stop(GUARD_S)
    assert helpers[0] == "tandem-digests"
    assert len(helpers) == 2


def test_a_digest_that_breaks_ends_the_transfer_thread_loudly(transport, events) -> None:
    def digest(blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
        raise ValueError("no such block")

    transfer = TransferThread(transport, digest, events.put, SystemClock())
    transfer.start()
    transport.finish.set()
    transfer.send(ConnectPeer(P))
    transfer.send(order(1, digests=True))
    assert take(events) == Connected(P)
    failed, stopped = take(events), take(events)
    assert isinstance(failed, ReadFailed)
    assert failed.kind is FailureKind.STOPPED
    assert isinstance(stopped, TransferStopped)
    assert stopped.error is not None
    assert "no such block" in stopped.error
    assert transfer.stop(GUARD_S)


def test_a_transfer_thread_that_never_started_closes_its_transport(transport, events) -> None:
    transfer = TransferThread(transport, lambda blocks, logical: [], events.put, SystemClock())
    transfer.send(order(1))
    assert transfer.stop(GUARD_S)
    assert isinstance(take(events), ReadFailed)
    assert take(events) == TransferStopped(None)
    assert transport.closed


def test_a_transfer_without_room_for_its_helper_thread_ends_and_reports_why(transport, events, monkeypatch) -> None:
    """As in a pod that may have no more processes."""
    transfer = TransferThread(transport, lambda blocks, logical: [], events.put, SystemClock())

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(transfer._helper, "start", refuse)
    transfer.send(order(1))
    transfer.start()
    assert isinstance(take(events), ReadFailed)
    stopped = take(events)
    assert isinstance(stopped, TransferStopped)
    assert stopped.error is not None
    assert "can't start new thread" in stopped.error
    assert transport.closed
    with pytest.raises(RuntimeError, match="stopped"):
        transfer.send(ConnectPeer(P))


def until_posted(transport: SteppedTransport) -> None:
    guard = threading.Event()
    for _ in range(int(GUARD_S / 0.001)):
        if transport.num_reads:
            return
        guard.wait(0.001)
    raise AssertionError("nothing was posted")
