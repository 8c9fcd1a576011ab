"""A transfer thread over the real transports: a peer that dies, stalls or lies becomes an event on each of them."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tandem.core.clock import SystemClock
from tandem.core.ids import BlockId
from tandem.engine.effects import StartRead, TearDownPeer
from tandem.engine.transfer_messages import (
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
    TransferStopped,
)
from tandem.kv.handoff import BlockDigest
from tandem.transfer.interface import ReadState
from tandem.transfer.transfer_thread import TransferThread
from tests.contract.transfer.conftest import GUARD_S, connect, copies_of

MAX_POST_BYTES = 1 << 20


class Consumer:
    """A transfer thread, its memory and its events, for one test."""

    def __init__(self, rig) -> None:
        transport, self.memory = rig.new_transport()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.transfer = TransferThread(transport, self.digest, self.events.put, SystemClock(), MAX_POST_BYTES)
        self.transfer.start()

    def digest(self, blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
        return [sum_of(self.memory[block], n) for block, n in zip(blocks, logical, strict=True)]

    def take(self) -> Event:
        return self.events.get(timeout=GUARD_S)

    def connect(self, peer) -> None:
        self.transfer.send(ConnectPeer(peer.handshake))
        assert self.take() == Connected(peer.handshake)

    def order(self, id: int, peer, remote: Sequence[int], local: Sequence[int]) -> StartRead:
        offered = tuple(BlockDigest(BlockId(r), sum_of(peer.content[r], n)) for n, r in enumerate(remote))
        return StartRead(id, peer.handshake.worker, tuple(range(len(offered))), offered, tuple(map(BlockId, local)))


def sum_of(block: np.ndarray, logical: int) -> tuple[int, ...]:
    """A digest for tests: order-sensitive over the block's words, one number."""
    words = block.view(np.uint64)
    weights = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(2 * logical + 1)
    return (int((words * weights).sum(dtype=np.uint64)),)


@pytest.fixture
def consumer(rig) -> Iterator[Consumer]:
    consumer = Consumer(rig)
    yield consumer
    assert consumer.transfer.stop(GUARD_S)
    events = []
    while not isinstance(event := consumer.take(), TransferStopped):
        events.append(event)
    assert event.error is None


def test_orders_are_read_checked_and_reported(consumer, good_peer) -> None:
    consumer.connect(good_peer)
    rng = np.random.default_rng(5)
    remote = rng.permutation(256)
    local = rng.permutation(256)
    for id in range(4):
        part = slice(id * 64, id * 64 + 64)
        consumer.transfer.send(consumer.order(id, good_peer, remote[part].tolist(), local[part].tolist()))
    done = [consumer.take() for _ in range(4)]
    assert all(isinstance(event, ReadDone) for event in done), done
    assert sorted(event.id for event in done) == [0, 1, 2, 3]
    assert np.array_equal(consumer.memory[local], good_peer.content[remote])
    consumer.transfer.send(SelfTest())
    assert isinstance(tested := consumer.take(), SelfTestDone)
    assert tested.error is None


def test_another_block_than_the_offered_one_is_noticed(consumer, good_peer) -> None:
    consumer.connect(good_peer)
    order = consumer.order(1, good_peer, [3, 4], [0, 1])
    heads = [offered.heads for offered in order.offered]
    offered = tuple(BlockDigest(o.block, other) for o, other in zip(order.offered[::-1], heads, strict=True))
    swapped = replace(order, offered=offered, local=order.local[::-1])
    consumer.transfer.send(swapped)
    event = consumer.take()
    assert isinstance(event, ReadFailed)
    assert (event.kind, event.drained) == (FailureKind.DIGEST, True)


def test_a_peer_that_is_killed_ends_its_orders(consumer, rig) -> None:
    peer = rig.spawn("victim", 31)
    consumer.connect(peer)
    consumer.transfer.send(consumer.order(1, peer, range(8), range(8)))
    assert isinstance(consumer.take(), ReadDone)
    peer.kill()
    consumer.transfer.send(consumer.order(2, peer, range(8), range(8)))
    failed, lost = consumer.take(), consumer.take()
    assert isinstance(failed, ReadFailed)
    assert (failed.kind, failed.drained) == (FailureKind.PEER, True)
    assert isinstance(lost, PeerLost)
    assert lost.proven


def test_a_reader_that_stops_in_the_middle_leaves_its_peer_alive(consumer, rig) -> None:
    peer = rig.spawn("victim", 34)
    consumer.connect(peer)
    consumer.transfer.send(consumer.order(1, peer, range(256), range(256)))
    assert consumer.transfer.stop(GUARD_S)
    connect(rig.transport, peer.handshake)
    assert rig.settle(rig.transport.post_read(peer.handshake, copies_of([7], [8]))) is ReadState.DONE
    assert np.array_equal(rig.memory[8], peer.content[7])


def test_a_stopped_peer_is_torn_down_and_its_next_life_is_read(consumer, rig) -> None:
    old = rig.spawn("victim", 32)
    consumer.connect(old)
    consumer.transfer.send(consumer.order(1, old, range(8), range(8)))
    assert isinstance(consumer.take(), ReadDone)
    old.signal(signal.SIGSTOP)
    consumer.transfer.send(consumer.order(2, old, range(128), range(128)))
    consumer.transfer.send(SelfTest())
    if rig.needs_its_target:
        assert isinstance(consumer.take(), SelfTestDone), "the read hangs, the transfer thread does not"
        consumer.transfer.send(TearDownPeer(old.handshake.worker, "deadline"))
        is_proven = not rig.is_held_by_its_target
        assert consumer.take() == ReadFailed(2, FailureKind.TEARDOWN, "deadline", is_proven)
        assert consumer.take() == PeerLost(old.handshake, is_proven, "deadline")
    else:
        assert {type(consumer.take()), type(consumer.take())} == {ReadDone, SelfTestDone}

    young = rig.spawn("victim", 33)
    consumer.transfer.send(ConnectPeer(young.handshake))
    while not isinstance(event := consumer.take(), Connected):
        assert isinstance(event, PeerLost)
    consumer.transfer.send(consumer.order(3, young, range(128), range(128, 256)))
    assert isinstance(consumer.take(), ReadDone)
    assert np.array_equal(consumer.memory[128:], young.content[:128])
    if rig.is_held_by_its_target:
        old.signal(signal.SIGCONT)
        assert consumer.take() == PeerDrained(old.handshake)
