"""A worker of two ranks, one of which runs behind a channel of bytes: it takes KV from workers of any degree."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from tandem.core.clock import SystemClock
from tandem.engine.rank_messages import StopTransfer
from tandem.engine.transfer_messages import (
    Command,
    Connected,
    ConnectFailed,
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
from tandem.kv.handoff import BlockDigest
from tandem.transfer.interface import ReadState
from tandem.transfer.multi_rank_transfer import MultiRankTransfer
from tandem.transfer.peer_layout import join_ranks
from tandem.transfer.transfer_thread import TransferThread
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.worker.ranks.remote_transfer import RemoteTransfer, carry_out
from tests.contract.transfer.conftest import GUARD_S, Rig, copies_of, reference
from tests.contract.transfer.heads import HEADS, LOCAL, MAX_POST_BYTES, REMOTE, SEED, ConsumerRank, World, layout_of
from tests.contract.transfer.peer_process import NUM_BLOCKS, known_content


class Channel:
    """Bytes in order, carried by a thread of its own; `cut` lets nothing through any more."""

    def __init__(self) -> None:
        self.deliver: Callable[[bytes], None] = lambda data: None
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        self._sent.put(data)

    def cut(self) -> None:
        self.deliver = lambda data: None

    def close(self) -> None:
        self._sent.put(None)
        self._thread.join(GUARD_S)

    def _carry(self) -> None:
        while (data := self._sent.get()) is not None:
            self.deliver(data)


class Consumer:
    """The transfer of a consumer with two ranks, and its events, for one test."""

    def __init__(self, world: World) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        # Of this test alone: stopping a transfer closes its transport.
        self.ranks = [ConsumerRank(world.kind, world.layout, rank, 2) for rank in range(2)]
        self.down, self.up = Channel(), Channel()
        self.service = self._transfer_of(1, lambda event: self.up.send(RANK_EVENTS.encode(event)))
        self.down.deliver = self._carry_out
        self.transfer = MultiRankTransfer(
            [lambda on_event: self._transfer_of(0, on_event), self._remote], self.events.put
        )
        self.transfer.start()
        self.service.start()

    def _transfer_of(self, rank: int, on_event: Callable[[Event], None]) -> TransferThread:
        consumer = self.ranks[rank]
        return TransferThread(consumer.transport, consumer.digest, on_event, SystemClock(), MAX_POST_BYTES)

    def _remote(self, on_event: Callable[[Event], None]) -> RemoteTransfer:
        self.remote = RemoteTransfer(lambda command: self.down.send(RANK_COMMANDS.encode(command)), on_event)
        self.up.deliver = self._receive
        return self.remote

    def _carry_out(self, data: bytes) -> None:
        command = RANK_COMMANDS.decode(data)
        assert isinstance(command, Command | StopTransfer)
        carry_out(self.service, command)

    def _receive(self, data: bytes) -> None:
        event = RANK_EVENTS.decode(data)
        assert isinstance(event, Event)
        self.remote.received(event)

    def take(self) -> Event:
        return self.events.get(timeout=GUARD_S)

    def connect(self, peer: TransportPeer) -> None:
        self.transfer.send(ConnectPeer(peer))
        assert self.take() == Connected(peer)

    def content(self) -> np.ndarray:
        """Of all ranks' pools, by block and head."""
        parts = [rank.memory.reshape(NUM_BLOCKS, len(rank.heads), -1) for rank in self.ranks]
        return np.concatenate(parts, axis=1)

    def close(self) -> list[Event]:
        assert self.transfer.stop(GUARD_S)
        assert self.service.stop(GUARD_S)
        self.down.close()
        self.up.close()
        events = [self.take()]
        while not isinstance(events[-1], TransferStopped):
            events.append(self.take())
        return events


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(str(request.param), layout_of("float32"), stack)


@pytest.fixture
def consumer(world: World) -> Iterator[Consumer]:
    consumer = Consumer(world)
    yield consumer
    if consumer.down._thread.is_alive():
        consumer.close()


EACH = pytest.mark.parametrize("world", ["local", "nixl", "tcp"], indirect=True)
ONE = pytest.mark.parametrize(
    "world", ["local", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("nixl", "tcp"))], indirect=True
)
"""Where the transport makes no difference to how the ranks work together, `make test` tries one."""


@EACH
def test_one_order_fills_both_ranks_and_is_answered_once(world: World, consumer: Consumer) -> None:
    expected = known_content(SEED, world.layout).reshape(NUM_BLOCKS, HEADS, -1)
    for id, degree in enumerate((1, 2, 4) if world.kind == "local" else (1, 2)):
        producer = world.producer(degree)
        consumer.connect(producer)
        for rank in consumer.ranks:
            rank.memory[:] = 0
        consumer.transfer.send(world.order(id, producer))
        done = consumer.take()
        assert isinstance(done, ReadDone)
        assert (done.id, done.num_bytes) == (id, len(REMOTE) * world.layout.block_bytes)
        assert np.array_equal(consumer.content()[LOCAL], expected[REMOTE])
    consumer.transfer.send(SelfTest())
    tested = consumer.take()
    assert isinstance(tested, SelfTestDone)
    assert tested.error is None
    assert consumer.close() == [TransferStopped(None)]


@ONE
def test_a_wrong_head_at_either_rank_fails_the_order(world: World, consumer: Consumer) -> None:
    producer = world.producer(2)
    consumer.connect(producer)
    good = world.order(0, producer)
    for head in (0, HEADS - 1):
        spoilt = tuple(
            BlockDigest(o.block, (*o.heads[:head], o.heads[head] ^ 1, *o.heads[head + 1 :])) for o in good.offered
        )
        consumer.transfer.send(replace(good, read=head, offered=spoilt))
        failed = consumer.take()
        assert isinstance(failed, ReadFailed)
        assert (failed.id, failed.kind, failed.drained) == (head, FailureKind.DIGEST, True)
    consumer.transfer.send(replace(good, read=99))
    assert isinstance(consumer.take(), ReadDone)


@EACH
def test_a_source_rank_that_dies_costs_the_peer_at_both_ranks(world: World, consumer: Consumer) -> None:
    """Each of our ranks reads from one of theirs only: the one that is unharmed gives the peer up, too."""
    victim, processes = world.spawn("joined-victim", 2)
    consumer.connect(victim)
    processes[1].kill()
    processes[1].wait()
    consumer.transfer.send(world.order(1, victim))
    failed = consumer.take()
    assert isinstance(failed, ReadFailed)
    assert (failed.id, failed.kind) == (1, FailureKind.PEER)
    lost = consumer.take()
    assert isinstance(lost, PeerLost)
    assert lost.peer == victim
    assert lost.proven or consumer.take() == PeerDrained(victim)
    consumer.transfer.send(world.order(2, victim))
    refused = consumer.take()
    assert isinstance(refused, ReadFailed)
    assert refused.kind is FailureKind.REFUSED


@ONE
def test_a_peer_that_one_rank_cannot_read_is_connected_at_none(world: World, consumer: Consumer) -> None:
    """Rank 1 reads from the last rank of four, whose metadata means nothing here."""
    producer = world.producer(4)
    *good, last = producer.ranks
    spoilt = replace(producer, ranks=(*good, replace(last, metadata=b"nothing", agent="nobody")))
    consumer.transfer.send(ConnectPeer(spoilt))
    assert isinstance(consumer.take(), ConnectFailed)
    consumer.connect(producer)


@ONE
def test_a_rank_behind_a_broken_channel_ends_the_transfer_with_every_order_answered(
    world: World, consumer: Consumer
) -> None:
    producer = world.producer(1)
    consumer.connect(producer)
    consumer.down.cut()
    consumer.transfer.send(world.order(7, producer))
    consumer.remote.lost("the process of rank 1 is gone")
    failed = consumer.take()
    assert isinstance(failed, ReadFailed)
    assert (failed.id, failed.kind, failed.drained) == (7, FailureKind.STOPPED, False)
    assert consumer.take() == TransferStopped("rank 1: the process of rank 1 is gone")
    with pytest.raises(RuntimeError, match="stopped"):
        consumer.transfer.send(ConnectPeer(producer))
    assert consumer.transfer.stop(GUARD_S)
    assert consumer.service.stop(GUARD_S)
    consumer.down.close()
    consumer.up.close()


@EACH
def test_descriptions_of_our_ranks_are_merged_into_one_worker(world: World, consumer: Consumer) -> None:
    """Others read from us as from one worker of two ranks."""
    us = reference("consumer-of-2")
    peer = join_ranks([rank.transport.describe(us) for rank in consumer.ranks])
    assert [(rank.region.head_start, rank.region.head_stop) for rank in peer.ranks] == [(0, 2), (2, 4)]
    consumer.ranks[0].memory[3], consumer.ranks[1].memory[3] = 1, 2
    consumer.transfer.send(SetPolling(True))
    (reader,) = world.consumer(1)
    reader.transport.connect(peer)
    assert Rig.settle(reader.transport.post_read(peer, copies_of([3], [9]))) is ReadState.DONE
    assert [set(part.tolist()) for part in np.split(reader.memory[9], 2)] == [{1}, {2}]
    assert reader.transport.disconnect(peer)
