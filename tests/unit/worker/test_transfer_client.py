"""Test which reads the transfer client orders: only verifiable ones where digests are required."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.ids import BlockId, HandoffId, HandoffKey, WorkerRef
from tandem.engine.effects import Effect, ReleaseHandoff, StartRead, TearDownPeer
from tandem.engine.transfer_messages import (
    Connected,
    ConnectPeer,
    FailureKind,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
)
from tandem.kv.handoff import BlockDigest
from tandem.transfer.multi_rank_transfer import RankEventMerger
from tandem.worker.kv.transfer_client import TransferClient
from tests.unit.transfer.scripted import P, Q
from tests.unit.worker.conftest import RecordingTransfer

READ = StartRead(7, P.worker, (0,), (BlockDigest(BlockId(1), (9,)),), (BlockId(3),))


class Engine:
    """Record which reads failed, and why. `follows` are the effects that the engine returns then."""

    def __init__(self, *follows: Effect) -> None:
        self.failed: list[tuple[int, str]] = []
        self.follows = list(follows)
        self.done: list[Effect] = []

    def post(self, command: Any) -> None:
        self.done += command(self, 0.0)

    def read_failed(self, id: int, reason: str, *, drained: bool, now: float) -> list[Any]:
        assert drained
        self.failed.append((id, reason))
        return self.follows

    def peer_lost(self, source: WorkerRef, reason: str, *, proven: bool, now: float) -> list[Any]:
        return []


def new_client(engine: Engine, transfer: RecordingTransfer, *, digests: bool) -> TransferClient:
    client = TransferClient(lambda on_event: transfer, engine.post, lambda event: None, digests=digests)
    client.on_event(Connected(P))
    return client


@pytest.mark.parametrize("heads", [(), (1, 2)])
def test_a_block_without_one_digest_for_each_head_is_read_unchecked_or_not_at_all(heads: tuple[int, ...]) -> None:
    read = StartRead(
        7, P.worker, range(2), (BlockDigest(BlockId(1), (9,)), BlockDigest(BlockId(2), heads)), (BlockId(3), BlockId(4))
    )
    engine, transfer = Engine(), RecordingTransfer()
    new_client(engine, transfer, digests=True).start_read(read)
    ((id, reason),) = engine.failed
    assert (id, transfer.commands) == (7, [])
    assert "one for each of 1 KV heads" in reason
    new_client(engine, transfer, digests=False).start_read(read)
    (order,) = transfer.commands
    assert isinstance(order, StartRead)
    assert not order.is_checked


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_failed_read_is_logged_as_a_warning_only_where_a_job_waited_for_it(
    is_awaited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tandem.worker.kv.transfer_client")
    follows = [ReleaseHandoff(P.worker, HandoffKey(HandoffId("h"), 1))] if is_awaited else []
    engine = Engine(*follows)
    reading = new_client(engine, RecordingTransfer(), digests=True)
    reading.start_read(READ)
    reading.on_event(ReadFailed(7, FailureKind.DIGEST, "block 3 is another", True))
    assert engine.failed == [(7, "block 3 is another")] and engine.done == follows
    ((_, level, text),) = caplog.record_tuples
    assert level == (logging.WARNING if is_awaited else logging.INFO)
    assert "read 7" in text and "block 3 is another" in text


def teardowns(transfer: RecordingTransfer) -> list[TearDownPeer]:
    return [command for command in transfer.commands if isinstance(command, TearDownPeer)]


def test_a_source_that_is_gone_is_given_up_once_nothing_is_read_of_it() -> None:
    transfer = RecordingTransfer()
    one = new_client(Engine(), transfer, digests=False)
    one.start_read(READ)
    trial = one.try_read(replace(READ, read=0))
    one.disconnect_when_idle(P.worker)
    (order, other) = (command for command in transfer.commands if isinstance(command, StartRead))
    one.on_event(ReadDone(other.read, 0, 0.0))
    assert trial.done() and not teardowns(transfer)
    one.on_event(ReadFailed(order.read, FailureKind.PEER, "broken", drained=True))
    assert [(down.source, "gone" in down.reason) for down in teardowns(transfer)] == [(P.worker, True)]
    one.disconnect_when_idle(P.worker)
    one.on_event(PeerLost(P, True, "gone"))
    one.disconnect_when_idle(P.worker)
    one.tear_down(P.worker, "a read does not end")
    assert len(teardowns(transfer)) == 2, "of one that is not connected there is nothing to give up"


def test_connecting_a_source_again_cancels_its_removal() -> None:
    transfer = RecordingTransfer()
    one = new_client(Engine(), transfer, digests=False)
    one.start_read(READ)
    one.disconnect_when_idle(P.worker)
    one.connect(P)
    one.on_event(ReadFailed(READ.read, FailureKind.PEER, "broken", drained=True))
    assert not teardowns(transfer)


def test_only_existing_sources_are_kept() -> None:
    transfer = RecordingTransfer()
    one = new_client(Engine(), transfer, digests=False)
    one.on_event(Connected(Q))
    one.keep({replace(P.worker, address="the-same:1")})
    assert [down.source for down in teardowns(transfer)] == [Q.worker]


def test_a_lost_source_is_logged_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    transfer = RecordingTransfer()
    one = new_client(Engine(), transfer, digests=False)
    one.disconnect_when_idle(P.worker)
    (down,) = teardowns(transfer)
    with caplog.at_level(logging.INFO):
        one.on_event(PeerLost(P, True, down.reason))
        one.on_event(PeerLost(Q, True, "its process ended"))
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_a_failed_probe_read_is_drained_once_its_source_is_lost_for_certain() -> None:
    """One rank had proven the end of its reads before the other one had lost the source: no PeerDrained follows."""
    one = new_client(Engine(), RecordingTransfer(), digests=False)
    trial = one.try_read(READ)
    merger = RankEventMerger(2)
    merger.submit(ConnectPeer(P))
    for rank in (0, 1):
        merger.on_event(rank, Connected(P))
    (id,) = one._reads
    merger.submit(replace(READ, read=id))
    merger.on_event(1, ReadDone(id, 64, 0.1))
    merger.on_event(0, ReadFailed(id, FailureKind.PEER, "cut", drained=False))
    merger.on_event(0, PeerLost(P, False, "cut"))
    merger.on_event(0, PeerDrained(P))
    for event in merger.events:
        one.on_event(event)
    assert trial.exception() is not None and one.undrained_probe() == P.worker
    merger.events.clear()
    merger.on_event(1, PeerLost(P, True, "cut"))
    assert list(merger.events) == [PeerLost(P, True, "cut")]
    one.on_event(merger.events.popleft())
    assert one.undrained_probe() is None
