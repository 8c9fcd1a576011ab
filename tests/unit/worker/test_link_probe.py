"""Test bandwidth probes between workers in this process: what they read and verify, and every way to end."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig, TransferConfig
from tandem.core.ids import WorkerRef
from tandem.engine.transfer_messages import PeerLost
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.kv_codec import encode_worker
from tandem.worker import worker
from tandem.worker.links import link_monitor, link_probe
from tests.e2e.client import PATIENCE_S, hand_over, new_request
from tests.unit.worker.conftest import Node, Nodes, settled, until
from tests.unit.worker.fake_model import MODEL, NUM_TRIAL_BLOCKS

IMPATIENT = HandoffConfig(drain_timeout_s=0.05)


async def measure(consumer: Node, source: WorkerRef, num_bytes: int = 1000) -> pb.ProbeLinkReply:
    """Measure a thousand bytes: a fake block has 64, so the probe takes several rounds."""
    request = pb.ProbeLinkRequest(source=encode_worker(source), num_bytes=num_bytes)
    return await consumer.client.stub.ProbeLink(request, timeout=PATIENCE_S)


async def test_trial_blocks_are_read_and_no_others(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    before = consumer.executor.pool.copy()
    reply = await measure(consumer, producer.worker.me)
    report = reply.report
    assert (report.link_type, report.problem, reply.HasField("refusal")) == ("shared_memory", "", False)
    assert report.num_bytes >= 1000 and report.seconds > 0
    assert (consumer.executor.pool == before).all()
    sources = consumer.executor.memory[512 : 512 + NUM_TRIAL_BLOCKS, 0, 0].tolist()
    targets = consumer.executor.memory[512 + NUM_TRIAL_BLOCKS :, 0, 0].tolist()
    assert (sources, targets) == ([1, 2, 3], [2, 3, 1]), "of two contents the second came last"


async def test_corrupted_bytes_make_no_measurement(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    producer.executor.memory[512 + 1] = 77
    reply = await measure(consumer, producer.worker.me)
    assert reply.refusal.kind == "kv_lost" and "has a different digest" in reply.refusal.message
    producer.executor.memory[512 + 1] = 2
    assert (await measure(consumer, producer.worker.me)).report.num_bytes > 0


async def test_a_link_below_its_requirements_is_judged_and_reported_to_gateways(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No other report reaches the gateway by chance.
    monkeypatch.setattr(worker, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(link_monitor, "AGAIN_S", 0.01)
    producer, consumer = await nodes.start(), await nodes.start(transfer=TransferConfig(min_gbps=1e6))
    report = (await measure(consumer, producer.worker.me)).report
    assert report.refused and report.problem.startswith("transfer.min_gbps is 1e+06")
    await consumer.client.until(lambda: any(update.links for update in consumer.client.updates))
    late = await consumer.other_gateway("late")
    await late.until(lambda: any(update.links for update in late.updates))
    assert [list(update.links) for update in late.updates if update.links] == [[report]]
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as mute:
        # It accepts connections, so its process has not ended.
        address = f"127.0.0.1:{mute.sockets[0].getsockname()[1]}"
        gone = await measure(consumer, WorkerRef(producer.worker.me.id, producer.worker.me.incarnation, address))
    assert gone.refusal.kind == "worker_lost"
    (link,) = (await consumer.client.stub.Describe(pb.DescribeRequest())).links
    assert link.refused and link.link_type == "unknown" and link.problem.startswith("it could not be measured: ")


async def test_a_read_that_does_not_end_costs_the_peer_and_no_more(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start(handoff=IMPATIENT)
    consumer.transport.gate.clear()
    reply = await measure(consumer, producer.worker.me)
    assert reply.refusal.kind == "kv_lost" and "a read does not end" in reply.refusal.message
    consumer.transport.gate.set()
    assert (await measure(consumer, producer.worker.me)).report.num_bytes > 0, "it is connected anew"
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, list(range(20)), 4))
    await consumer.client.end_of(key)
    await settled(consumer, producer)


async def test_an_abandoned_probe_leaves_nothing_and_a_second_caller_shares_it(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    consumer.transport.gate.clear()
    calls = [asyncio.create_task(measure(consumer, producer.worker.me)) for _ in range(3)]
    await until(lambda: consumer.transport.num_held)
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    consumer.transport.gate.set()
    second, third = await asyncio.gather(*calls[1:])
    assert second == third and second.report.num_bytes > 0
    assert consumer.worker._link_monitor.reports.number == 1 and not consumer.worker._link_monitor._running


@pytest.mark.slow
async def test_a_worker_that_stops_in_the_middle_ends_it(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's read hangs, and its timeout is longer than the caller's. The fixture checks for leftover tasks and
    threads.
    """
    monkeypatch.setattr(worker, "FLUSH_S", 0.2)
    producer, consumer = await nodes.start(), await nodes.start(handoff=HandoffConfig(drain_timeout_s=3600.0))
    consumer.transport.gate.clear()
    call = asyncio.create_task(measure(consumer, producer.worker.me))
    await until(lambda: consumer.transport.num_held)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(consumer.worker.stop(), call, return_exceptions=True)
    assert call.done() and not consumer.worker._link_monitor._running


async def test_the_probe_queue_is_bounded(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_monitor, "MAX_WAITING", 1)
    producer, other, consumer = await nodes.start(), await nodes.start(), await nodes.start()
    consumer.transport.gate.clear()
    first = asyncio.create_task(measure(consumer, producer.worker.me))
    await until(lambda: consumer.transport.num_held)
    assert (await measure(consumer, other.worker.me)).refusal.kind == "overloaded"
    consumer.transport.gate.set()
    assert (await first).report.num_bytes > 0
    assert (await measure(consumer, other.worker.me)).report.num_bytes > 0


@pytest.mark.parametrize(
    ("transfer", "link_type"),
    [
        (TransferConfig(), "unknown"),
        (TransferConfig(require="rdma"), "shared_memory"),
        (TransferConfig(min_gbps=1e6), "shared_memory"),
    ],
)
async def test_first_transfers_report_the_link_or_trigger_a_measurement(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, transfer: TransferConfig, link_type: str
) -> None:
    monkeypatch.setattr("tandem.worker.kv.transfer_client.MIN_SAMPLE_BYTES", 64)
    monkeypatch.setattr(link_monitor, "MIN_SAMPLE_BYTES", 640)
    monkeypatch.setattr(link_monitor, "BEAT_S", 0.01)
    monkeypatch.setattr(link_monitor, "AGAIN_S", 0.01)
    monkeypatch.setattr(link_probe, "ENOUGH_S", 0.02)
    producer, consumer = await nodes.start(), await nodes.start(transfer=transfer)
    book = consumer.worker._link_monitor.reports
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, list(range(80)), 4))
    await consumer.client.end_of(key)
    await until(lambda: book.find(producer.worker.me) is not None)
    report = book.find(producer.worker.me)
    assert report is not None and report.link_type == link_type and report.num_bytes >= 640
    assert (report.evidence == "its first transfers") is (link_type == "unknown")
    assert report.refused is (transfer.min_gbps > 0)


async def test_a_source_that_was_lost_is_measured_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_monitor, "BEAT_S", 0.01)
    monkeypatch.setattr("tandem.worker.links.link_monitor.FRESH_S", 0.0)
    monkeypatch.setattr(link_probe, "ENOUGH_S", 0.02)
    producer, consumer = await nodes.start(), await nodes.start()
    await measure(consumer, producer.worker.me)
    book = consumer.worker._link_monitor.reports
    number = book.number
    peer = consumer.worker._transfer_client._peers[producer.worker.me]
    consumer.worker._on_transfer_event(PeerLost(peer, True, "planted"))
    await until(lambda: book.number > number)
    assert book.find(producer.worker.me) is not None


class Leaping:
    """Advance by a thousand seconds at each call of `now`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1000.0
        return self._now


async def test_a_late_event_loop_does_not_make_a_link_slow(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    probe = consumer.worker._link_monitor._probe
    probe.clock = Leaping()
    report = (await measure(consumer, producer.worker.me)).report
    assert 0 < report.seconds < 1000.0


async def test_nobody_is_measured_while_a_trial_read_may_go_on(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the trial read writes late would look like wrong bytes of another probe."""
    producer, other = await nodes.start(), await nodes.start()
    consumer = await nodes.start(handoff=IMPATIENT, transfer=TransferConfig(min_gbps=1e-9))
    disconnect, proven = consumer.transport.disconnect, threading.Event()
    monkeypatch.setattr(consumer.transport, "disconnect", lambda peer: disconnect(peer) and proven.is_set())
    consumer.transport.gate.clear()
    assert (await measure(consumer, producer.worker.me)).refusal.kind == "kv_lost"
    consumer.transport.gate.set()
    reply = await measure(consumer, other.worker.me)
    assert reply.refusal.kind == "overloaded" and "may still write" in reply.refusal.message
    report = consumer.worker._link_monitor.reports.find(other.worker.me)
    assert report is not None and not report.refused
    proven.set()
    await until(lambda: consumer.worker._transfer_client.undrained_probe() is None)
    assert (await measure(consumer, other.worker.me)).report.num_bytes > 0


async def test_another_spelling_of_an_address_costs_no_connection(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    await measure(consumer, producer.worker.me)
    connected = dict(consumer.worker._transfer_client._peers)
    other = replace(producer.worker.me, address=producer.worker.me.address.replace("127.0.0.1", "localhost"))
    assert other != producer.worker.me
    report = (await measure(consumer, other)).report
    assert report.num_bytes > 0 and report.source.address == other.address
    assert consumer.worker._transfer_client._peers == connected
