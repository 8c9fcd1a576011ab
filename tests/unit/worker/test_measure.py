"""Measurements between workers in this process: what they read and check, and every way in which they can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig, TransferConfig
from tandem.core.ids import WorkerRef
from tandem.wire.convert_kv import encode_worker
from tandem.wire.gen import worker_pb2 as pb
from tandem.worker import attestor, life, yardstick
from tests.e2e.client import PATIENCE_S, hand_over, new_request
from tests.unit.worker.conftest import Node, Nodes
from tests.unit.worker.fake_model import MODEL, NUM_TRIAL_BLOCKS

IMPATIENT = HandoffConfig(drain_timeout_s=0.05)


async def measure(taker: Node, source: WorkerRef, num_bytes: int = 1000) -> pb.MeasureReply:
    """A thousand bytes: a fake block has 64, so that several rounds are made."""
    request = pb.MeasureRequest(source=encode_worker(source), num_bytes=num_bytes)
    return await taker.client.stub.Measure(request, timeout=PATIENCE_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_trial_blocks_are_read_and_no_others(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    before = taker.executor.pool.copy()
    reply = await measure(taker, giver.worker.me)
    report = reply.report
    assert (report.way, report.problem, reply.HasField("refusal")) == ("shared_memory", "", False)
    assert report.num_bytes >= 1000 and report.seconds > 0
    assert (taker.executor.pool == before).all()
    sources = taker.executor.memory[512 : 512 + NUM_TRIAL_BLOCKS, 0, 0].tolist()
    targets = taker.executor.memory[512 + NUM_TRIAL_BLOCKS :, 0, 0].tolist()
    assert (sources, targets) == ([1, 2, 3], [2, 3, 1]), "of two contents the second came last"


async def test_what_arrives_wrong_is_no_measurement(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    giver.executor.memory[512 + 1] = 77
    reply = await measure(taker, giver.worker.me)
    assert reply.refusal.kind == "kv_lost" and "is another" in reply.refusal.message
    giver.executor.memory[512 + 1] = 2
    assert (await measure(taker, giver.worker.me)).report.num_bytes > 0


async def test_a_way_that_is_not_as_promised_is_judged_and_told_to_gateways(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody is told by chance.
    monkeypatch.setattr(life, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(attestor, "AGAIN_S", 0.01)
    giver, taker = await nodes.start(), await nodes.start(transfer=TransferConfig(min_gbps=1e6))
    report = (await measure(taker, giver.worker.me)).report
    assert report.refused and report.problem.startswith("transfer.min_gbps is 1e+06")
    await taker.client.until(lambda: any(update.ways for update in taker.client.updates))
    late = await taker.other_gateway("late")
    await late.until(lambda: any(update.ways for update in late.updates))
    assert [list(update.ways) for update in late.updates if update.ways] == [[report]]
    gone = await measure(taker, WorkerRef(giver.worker.me.id, giver.worker.me.incarnation, "127.0.0.1:1"))
    assert gone.refusal.kind == "worker_lost"
    (told,) = (await taker.client.stub.Describe(pb.DescribeRequest())).ways
    assert told.refused and told.way == "unknown" and told.problem.startswith("it could not be measured: ")


async def test_a_read_that_does_not_end_costs_the_peer_and_no_more(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start(handoff=IMPATIENT)
    taker.transport.gate.clear()
    reply = await measure(taker, giver.worker.me)
    assert reply.refusal.kind == "kv_lost" and "a read does not end" in reply.refusal.message
    taker.transport.gate.set()
    assert (await measure(taker, giver.worker.me)).report.num_bytes > 0, "it is connected anew"
    key, _ = await hand_over(giver.client, taker.client, new_request(MODEL, list(range(20)), 4))
    await taker.client.end_of(key)
    await taker.client.settled()
    await giver.client.settled()


async def test_who_stops_waiting_leaves_nothing_and_a_second_one_waits_for_the_same(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    taker.transport.gate.clear()
    calls = [asyncio.create_task(measure(taker, giver.worker.me)) for _ in range(3)]
    await until(lambda: len(taker.transport._held))
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    taker.transport.gate.set()
    second, third = await asyncio.gather(*calls[1:])
    assert second == third and second.report.num_bytes > 0
    assert taker.worker._attestor.book.number == 1 and not taker.worker._attestor._running


@pytest.mark.slow
async def test_a_worker_that_stops_in_the_middle_ends_it(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its read hangs, and its patience is longer than ours. The fixture looks for tasks and threads that are left."""
    monkeypatch.setattr(life, "FLUSH_S", 0.2)
    giver, taker = await nodes.start(), await nodes.start(handoff=HandoffConfig(drain_timeout_s=3600.0))
    taker.transport.gate.clear()
    call = asyncio.create_task(measure(taker, giver.worker.me))
    await until(lambda: len(taker.transport._held))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(taker.worker.stop(), call, return_exceptions=True)
    assert call.done() and not taker.worker._attestor._running


async def test_no_more_wait_for_their_turn_than_may(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attestor, "MAX_WAITING", 1)
    giver, other, taker = await nodes.start(), await nodes.start(), await nodes.start()
    taker.transport.gate.clear()
    first = asyncio.create_task(measure(taker, giver.worker.me))
    await until(lambda: len(taker.transport._held))
    assert (await measure(taker, other.worker.me)).refusal.kind == "overloaded"
    taker.transport.gate.set()
    assert (await first).report.num_bytes > 0
    assert (await measure(taker, other.worker.me)).report.num_bytes > 0


@pytest.mark.parametrize(
    ("promised", "way"),
    [
        (TransferConfig(), "unknown"),
        (TransferConfig(require="rdma"), "shared_memory"),
        (TransferConfig(min_gbps=1e6), "shared_memory"),
    ],
)
async def test_first_transfers_tell_or_have_the_way_measured(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, promised: TransferConfig, way: str
) -> None:
    monkeypatch.setattr("tandem.worker.traffic.TELLING_BYTES", 64)
    monkeypatch.setattr(attestor, "TELLING_BYTES", 640)
    monkeypatch.setattr(attestor, "BEAT_S", 0.01)
    monkeypatch.setattr(attestor, "AGAIN_S", 0.01)
    monkeypatch.setattr(yardstick, "ENOUGH_S", 0.02)
    giver, taker = await nodes.start(), await nodes.start(transfer=promised)
    book = taker.worker._attestor.book
    key, _ = await hand_over(giver.client, taker.client, new_request(MODEL, list(range(80)), 4))
    await taker.client.end_of(key)
    await until(lambda: book.find(giver.worker.me) is not None)
    report = book.find(giver.worker.me)
    assert report is not None and report.way == way and report.num_bytes >= 640
    assert (report.evidence == "its first transfers") is (way == "unknown")
    assert report.refused is (promised.min_gbps > 0)


async def test_a_source_that_was_lost_is_measured_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attestor, "BEAT_S", 0.01)
    monkeypatch.setattr("tandem.worker.way_book.FRESH_S", 0.0)
    monkeypatch.setattr(yardstick, "ENOUGH_S", 0.02)
    giver, taker = await nodes.start(), await nodes.start()
    await measure(taker, giver.worker.me)
    book = taker.worker._attestor.book
    number = book.number
    taker.worker._peer_lost(giver.worker.me)
    await until(lambda: book.number > number)
    assert book.find(giver.worker.me) is not None


class Leaping:
    """Each look at it is a thousand seconds later."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1000.0
        return self._now


async def test_a_late_event_loop_does_not_make_a_way_slow(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    yardstick = taker.worker._attestor._yardstick
    yardstick._context = replace(yardstick._context, clock=Leaping())
    report = (await measure(taker, giver.worker.me)).report
    assert 0 < report.seconds < 1000.0


async def test_nobody_is_measured_while_a_trial_read_may_go_on(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that writes late would look like another's wrong bytes."""
    giver, other = await nodes.start(), await nodes.start()
    taker = await nodes.start(handoff=IMPATIENT, transfer=TransferConfig(min_gbps=1e-9))
    disconnect, proven = taker.transport.disconnect, threading.Event()
    monkeypatch.setattr(taker.transport, "disconnect", lambda peer: disconnect(peer) and proven.is_set())
    taker.transport.gate.clear()
    assert (await measure(taker, giver.worker.me)).refusal.kind == "kv_lost"
    taker.transport.gate.set()
    reply = await measure(taker, other.worker.me)
    assert reply.refusal.kind == "overloaded" and "may still write" in reply.refusal.message
    report = taker.worker._attestor.book.find(other.worker.me)
    assert report is not None and not report.refused
    proven.set()
    await until(lambda: taker.worker._reads.trials.undrained() is None)
    assert (await measure(taker, other.worker.me)).report.num_bytes > 0


async def test_another_spelling_of_an_address_costs_no_connection(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    await measure(taker, giver.worker.me)
    connected = dict(taker.worker._reads._peers)
    other = replace(giver.worker.me, address=giver.worker.me.address.replace("127.0.0.1", "localhost"))
    assert other != giver.worker.me
    report = (await measure(taker, other)).report
    assert report.num_bytes > 0 and report.source.address == other.address
    assert taker.worker._reads._peers == connected
