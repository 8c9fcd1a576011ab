"""Test hand-offs between two workers of this process, over real gRPC and the local transport."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem.core.config import ClusterConfig, EngineConfig, HandoffConfig, WorkerConfig
from tandem.core.errors import ErrorKind
from tandem.core.events import Cancelled, Failed, Finished, FinishReason
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, WorkerId, WorkerRef
from tandem.core.request import PrefillJob, Request
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.kv import handshake, producer_session
from tandem.worker.kv.handoff_service import ConsumerStream
from tests.e2e.client import hand_over, new_request, resume_from
from tests.ports import free_port
from tests.unit.worker.conftest import Gate, Node, Nodes, pace, settled, until
from tests.unit.worker.fake_model import MODEL, continuation

PROMPT = list(range(1, 60))
ALONE = HandoffId("alone")
QUICK = HandoffConfig(lease_s=1.0, pull_timeout_s=1.0, drain_timeout_s=1.0)
BRIEF = replace(QUICK, lease_s=0.3)
"""A short timeout for tests in which the source ends and may lose its leases before."""


@pytest.mark.parametrize("has_digests", [True, False])
async def test_prefill_here_decode_there(nodes: Nodes, has_digests: bool) -> None:
    handoff = HandoffConfig(digests=has_digests)
    producer, consumer = await nodes.start(handoff=handoff), await nodes.start(handoff=handoff)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 12))
    prefilled, finished = await producer.client.end_of(key), await consumer.client.end_of(key)
    assert prefilled == Finished(key, None, 1, 0)
    assert finished == Finished(key, FinishReason.LENGTH, 12, 0)
    assert producer.client.tokens(key) == continuation(PROMPT, 1)
    assert consumer.client.tokens(key) == continuation(PROMPT, 12)
    pulled = consumer.client.pulled(key)
    assert pulled is not None and pulled.num_blocks == 15 and pulled.num_bytes == 15 * 64
    await settled(producer, consumer)


async def test_blocks_that_the_consumer_has_are_not_read(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    for num_read in (15, 2):
        prompt = PROMPT if num_read == 15 else [*PROMPT[:56], 7, 8, 9, 10, 11]
        key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, prompt, 5))
        await consumer.client.end_of(key)
        assert consumer.client.tokens(key) == continuation(prompt, 5)
        pulled = consumer.client.pulled(key)
        assert pulled is not None and pulled.num_blocks == num_read
    await settled(producer, consumer)


async def test_many_hand_offs_in_both_directions(nodes: Nodes) -> None:
    ends = (await nodes.start(num_blocks=64), await nodes.start(num_blocks=64))
    started = []
    for i in range(8):
        producer, consumer = ends[i % 2], ends[1 - i % 2]
        prompt = [i, *PROMPT]
        key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, prompt, 6))
        started.append((consumer, prompt, key))
    for consumer, prompt, key in started:
        await consumer.client.end_of(key)
        assert consumer.client.tokens(key) == continuation(prompt, 6)
    await settled(*ends)


async def test_the_first_token_waits_for_no_transfer(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    consumer.transport.gate.clear()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 8))
    await producer.client.num_tokens(key, 1)
    await consumer.client.num_tokens(key, 1)
    assert consumer.client.pulled(key) is None and not consumer.client.ends(key)
    # The token is published with the announcement, the capacity for the blocks with the next plan.
    await consumer.client.under_read()
    assert (await producer.client.books()).num_leased_blocks == 15
    consumer.transport.gate.set()
    await consumer.client.end_of(key)
    assert consumer.client.tokens(key) == continuation(PROMPT, 8)
    await settled(producer, consumer)


async def test_the_resume_may_arrive_long_before_or_after_the_prefill(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    request = await prefill_alone(producer)
    key = await resume_from(producer.worker.me, consumer.client, request, ALONE)
    await consumer.client.end_of(key)
    assert consumer.client.tokens(key) == continuation(PROMPT, 4)


async def test_a_second_consumer_pulls_from_the_same_lease(nodes: Nodes) -> None:
    producer, first, second = await nodes.start(), await nodes.start(), await nodes.start()
    first.transport.gate.clear()
    request = new_request(MODEL, PROMPT, 6)
    key, handoff = await hand_over(producer.client, first.client, request)
    await first.client.num_tokens(key, 1)
    assert await resume_from(producer.worker.me, second.client, request, handoff.handoff) == key
    await second.client.end_of(key)
    assert second.client.tokens(key) == continuation(PROMPT, 6)
    await first.client.cancel(key)
    first.transport.gate.set()
    await settled(first, producer)


async def test_a_consumer_that_another_one_has_replaced_does_not_end_the_lease(nodes: Nodes) -> None:
    quick = replace(QUICK, pull_timeout_s=20.0)
    producer, first, second = [await nodes.start(handoff=quick) for _ in range(3)]
    first.transport.gate.clear()
    second.transport.gate.clear()
    request = new_request(MODEL, PROMPT, 6)
    key, handoff = await hand_over(producer.client, first.client, request)
    await first.client.num_tokens(key, 1)
    await resume_from(producer.worker.me, second.client, request, handoff.handoff)
    await second.client.under_read()
    await first.client.cancel(key)
    first.transport.gate.set()
    await settled(first)
    # The second consumer renews its lease meanwhile.
    await asyncio.sleep(0.5 * quick.lease_s)
    assert (await producer.client.books()).num_leased_blocks == 15
    second.transport.gate.set()
    await second.client.end_of(key)
    assert second.client.tokens(key) == continuation(PROMPT, 6)
    await settled(producer, second)


@pytest.mark.parametrize("state", ["following", "half computed", "half moved", "decoding"])
async def test_cancel_leaves_nothing_on_either_side(nodes: Nodes, state: str) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    gate = Gate(producer.executor, lambda plan: state == "half computed" and getattr(plan, "number", 0) >= 3)
    if state == "half moved":
        consumer.transport.gate.clear()
    pace(consumer.executor)
    request = new_request(MODEL, PROMPT, 400)
    if state == "following":
        key = await resume_from(producer.worker.me, consumer.client, request)
    else:
        key, _ = await hand_over(producer.client, consumer.client, request)
    if state == "half computed":
        await asyncio.to_thread(gate.entered.wait)
    if state == "half moved":
        # The first token may be published before the first read has begun.
        await consumer.client.under_read()
    if state == "decoding":
        await consumer.client.num_tokens(key, 4)
    cancelling = asyncio.gather(consumer.client.cancel(key), producer.client.cancel(key))
    gate.open()
    await cancelling
    assert await consumer.client.end_of(key) == Cancelled(key)
    if state == "half moved":
        # A read cannot be cancelled: its blocks are not free before it has ended.
        books = await consumer.client.books()
        assert books.num_reading_blocks > 0 and books.num_sequences == 0
        assert (await producer.client.settled()).num_leases == 0
        consumer.transport.gate.set()
    await settled(producer, consumer)
    assert producer.worker.healthy() is None and consumer.worker.healthy() is None


async def prefill_alone(producer: Node) -> Request:
    """Let a producer compute a prompt that nobody has asked for, and offer it as `ALONE`."""
    prefill = PrefillJob(request=new_request(MODEL, PROMPT, 4), attempt=1, handoff=ALONE)
    await producer.client.submit(prefill)
    await producer.client.end_of(prefill.key)
    return prefill.request


@pytest.mark.slow
async def test_a_prefill_that_nobody_takes_loses_its_lease(nodes: Nodes) -> None:
    producer = await nodes.start(handoff=QUICK)
    await prefill_alone(producer)
    assert (await producer.client.books()).num_leased_blocks == 15
    await producer.client.settled()


async def test_release_by_the_gateway_ends_a_lease(nodes: Nodes) -> None:
    producer = await nodes.start()
    await prefill_alone(producer)
    await producer.client.release(HandoffKey(ALONE, 0))
    assert (await producer.client.books()).num_leased_blocks == 15, "a release of an old attempt does nothing"
    await producer.client.release(HandoffKey(ALONE, 1))
    await producer.client.settled()


@pytest.mark.slow
async def test_leases_are_renewed_while_a_pull_waits(nodes: Nodes) -> None:
    quick = replace(QUICK, pull_timeout_s=20.0)
    producer, consumer = await nodes.start(handoff=quick), await nodes.start(handoff=quick)
    consumer.transport.gate.clear()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 4))
    await consumer.client.num_tokens(key, 1)
    await asyncio.sleep(1.6 * quick.lease_s)
    assert not consumer.client.ends(key) and (await producer.client.books()).num_leases == 1
    consumer.transport.gate.set()
    assert isinstance(await consumer.client.end_of(key), Finished)
    assert consumer.client.tokens(key) == continuation(PROMPT, 4)


@pytest.mark.slow
async def test_steps_longer_than_the_lease_lose_nothing(nodes: Nodes) -> None:
    """A producer replies only between its steps, so the consumer sees the lease expire in each; late replies restore
    it.
    """
    handoff = HandoffConfig(lease_s=0.2, pull_timeout_s=10.0)
    producer, consumer = await nodes.start(handoff=handoff), await nodes.start(handoff=handoff)
    pace(producer.executor, 3 * handoff.lease_s)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT[:20], 4))
    assert isinstance(await consumer.client.end_of(key), Finished)
    assert consumer.client.tokens(key) == continuation(PROMPT[:20], 4)


async def test_a_source_that_is_not_there_fails_the_resume(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_session, "BACKOFF_S", 0.005)
    producer, consumer = await nodes.start(), await nodes.start()
    await producer.worker.stop()
    key = await resume_from(producer.worker.me, consumer.client, new_request(MODEL, PROMPT, 4))
    await consumer.client.failure(key, ErrorKind.KV_LOST)
    await consumer.client.settled()


@pytest.mark.parametrize("what", ["incarnation", "fingerprint"])
async def test_a_source_that_is_another_is_not_read(nodes: Nodes, what: str) -> None:
    producer = await nodes.start()
    consumer = await nodes.start(fingerprint="f00d" if what == "incarnation" else "beef")
    source = producer.worker.me
    if what == "incarnation":
        source = replace(source, incarnation=Incarnation(source.incarnation - 1))
    key = await resume_from(source, consumer.client, new_request(MODEL, PROMPT, 4))
    failed = await consumer.client.failure(key, ErrorKind.KV_LOST)
    assert ("incarnation" if what == "incarnation" else "model") in failed.message
    await consumer.client.settled()


@pytest.mark.slow
async def test_a_producer_that_stops_in_mid_prefill_fails_both(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(handoff=BRIEF), await nodes.start(handoff=BRIEF)
    pace(producer.executor, 0.05)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 4))
    async with asyncio.timeout(10):
        while (await consumer.client.books()).num_pulls == 0 or not consumer.client.events:
            await asyncio.sleep(0.01)
            if (await producer.client.books()).num_leased_blocks:
                break
    await producer.worker.stop()
    await producer.client.failure(key, ErrorKind.WORKER_LOST)
    await consumer.client.failure(key, ErrorKind.KV_LOST)
    await consumer.client.settled()


@pytest.mark.parametrize("is_used", [True, False])
async def test_a_lost_source_is_disconnected(nodes: Nodes, is_used: bool) -> None:
    """A mapped pool keeps its memory, which on a GPU the next worker there needs."""
    producer, consumer = await nodes.start(handoff=BRIEF), await nodes.start(handoff=BRIEF)
    if is_used:
        pace(producer.executor, 0.05)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 4))
    await until(lambda: "1 peers" in repr(consumer.worker._transfer_client))
    if not is_used:
        await consumer.client.end_of(key)
    await producer.worker.stop()
    await until(lambda: "0 peers, 0 lingering" in repr(consumer.worker._transfer_client))
    await consumer.client.end_of(key)
    await consumer.client.settled()


async def lose_source(nodes: Nodes, handoff: HandoffConfig) -> Failed:
    """Stop a producer in the middle of a prefill; return how the hand-off fails at the consumer, which is then idle."""
    producer, consumer = await nodes.start(handoff=handoff), await nodes.start(handoff=handoff)
    gate = Gate(producer.executor, lambda plan: getattr(plan, "number", 0) == 3)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 4))
    await asyncio.to_thread(gate.entered.wait)
    # Four more steps would end the prefill.
    pace(producer.executor, 0.5)
    gate.open()
    await producer.worker.stop()
    failed = await consumer.client.failure(key, ErrorKind.KV_LOST)
    await consumer.client.settled()
    return failed


async def test_a_source_whose_process_has_ended_is_given_up_before_its_leases_expire(nodes: Nodes) -> None:
    handoff = HandoffConfig(lease_s=3600.0, pull_timeout_s=3600.0)
    assert "has ended" in (await lose_source(nodes, handoff)).message


@pytest.mark.slow
async def test_an_unreachable_source_is_given_up_when_its_leases_expire(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that replies but has no offer yet gets a longer time, which does not apply here."""

    async def answers_nothing(address: str, timeout_s: float) -> bool:
        return False

    monkeypatch.setattr(handshake, "refuses_connections", answers_nothing)
    handoff = HandoffConfig(lease_s=0.3, pull_timeout_s=3600.0)
    await lose_source(nodes, handoff)


async def test_another_incarnation_recognized_by_its_guard_alone_is_not_queried_again(
    nodes: Nodes, secret: Path
) -> None:
    cluster = ClusterConfig(secret_file=str(secret))
    producer, consumer = await nodes.start(cluster=cluster), await nodes.start(cluster=cluster)
    older = replace(producer.worker.me, incarnation=Incarnation(producer.worker.me.incarnation - 1))
    key = await resume_from(older, consumer.client, new_request(MODEL, PROMPT, 4))
    failed = await consumer.client.failure(key, ErrorKind.KV_LOST)
    assert "another incarnation of" in failed.message
    await consumer.client.settled()


async def test_a_broken_stream_is_opened_again_and_nothing_is_lost(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    gate = Gate(producer.executor, lambda plan: getattr(plan, "number", 0) == 3)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 6))
    await asyncio.to_thread(gate.entered.wait)
    producer.worker._handoffs.close()
    gate.open()
    assert isinstance(await consumer.client.end_of(key), Finished)
    assert consumer.client.tokens(key) == continuation(PROMPT, 6)
    await settled(producer, consumer)


@pytest.mark.slow
async def test_a_transport_that_loses_its_peer_connects_again(nodes: Nodes) -> None:
    impatient = replace(QUICK, drain_timeout_s=0.1)
    producer, consumer = await nodes.start(handoff=QUICK), await nodes.start(handoff=impatient)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 6))
    await consumer.client.end_of(key)
    # A read that does not end costs the whole peer connection.
    consumer.transport.gate.clear()
    prompt = [99, *PROMPT]
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, prompt, 6))
    await consumer.client.failure(key, ErrorKind.KV_LOST)
    await consumer.client.settled()
    consumer.transport.gate.set()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, prompt, 6))
    await consumer.client.end_of(key)
    assert consumer.client.tokens(key) == continuation(prompt, 6)


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_kv_changed_in_transit_is_refused(
    nodes: Nodes, is_awaited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem.worker.kv.transfer_client")
    producer, consumer = await nodes.start(), await nodes.start()
    consumer.transport.gate.clear()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 6))
    await consumer.client.num_tokens(key, 1)
    producer.executor.pool[:, 0] += 1
    if not is_awaited:
        await consumer.client.under_read()
        await consumer.client.cancel(key)
    consumer.transport.gate.set()
    end = await consumer.client.end_of(key)
    await settled(consumer, producer)
    levels = {record.levelno for record in caplog.records if "has a different digest" in record.getMessage()}
    if is_awaited:
        assert isinstance(end, Failed) and end.kind is ErrorKind.KV_LOST and "has a different digest" in end.message
        assert logging.WARNING in levels
    else:
        assert end == Cancelled(key) and levels == {logging.INFO}


async def test_blocks_of_a_cancelled_job_are_not_reused_while_they_may_be_read(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """The cancel reaches the producer first; its consumer is in the middle of a step and still reads."""
    caplog.set_level(logging.INFO, "tandem.worker.kv.transfer_client")
    producer, consumer = await nodes.start(num_blocks=40), await nodes.start()
    consumer.transport.gate.clear()
    key, handoff = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 6))
    await consumer.client.num_tokens(key, 1)
    gate = Gate(consumer.executor)
    busy = await consumer.client.generate(new_request(MODEL, [5], 2))
    await asyncio.to_thread(gate.entered.wait)
    await producer.client.cancel(key)
    await producer.client.release(handoff)
    assert (await producer.client.books()).num_leased_blocks == 15
    for number in range(3):
        await producer.client.end_of(await producer.client.generate(new_request(MODEL, [number, *PROMPT], 2)))
    consumer.transport.gate.set()
    gate.open()
    await consumer.client.end_of(key)
    await consumer.client.end_of(busy)
    await settled(consumer, producer)
    assert "has a different digest" not in caplog.text


async def test_a_producer_without_digests_is_refused_by_a_consumer_that_requires_them(nodes: Nodes) -> None:
    producer = await nodes.start(handoff=HandoffConfig(digests=False))
    consumer = await nodes.start()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 6))
    failed = await consumer.client.failure(key, ErrorKind.KV_LOST)
    assert "handoff.digests" in failed.message
    await consumer.client.settled()


async def test_the_first_token_may_be_the_last(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 1))
    end = await producer.client.end_of(key)
    assert isinstance(end, Finished) and end.reason is FinishReason.LENGTH
    # Its gateway cancels the Resume; otherwise the end of the hand-off does, and that is no error.
    assert await consumer.client.end_of(key) == Finished(key, None, 0, 0)
    await settled(producer, consumer)


async def test_a_consumer_with_a_small_pool_waits_for_room(nodes: Nodes) -> None:
    producer = await nodes.start()
    consumer = await nodes.start(num_blocks=20, engine=EngineConfig(block_size=4, max_num_batched_tokens=8))
    pace(consumer.executor, 0.002)
    local = await consumer.client.generate(new_request(MODEL, [5, *PROMPT[:40]], 30))
    await consumer.client.num_tokens(local, 1)
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 6))
    await consumer.client.end_of(key)
    await consumer.client.end_of(local)
    assert consumer.client.tokens(key) == continuation(PROMPT, 6)
    assert consumer.client.tokens(local) == continuation([5, *PROMPT[:40]], 30)
    await settled(consumer, producer)


async def test_an_ended_follow_stream_is_opened_anew(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next message opens another stream: gRPC reports a call in a wrong state, which the worker treats as a broken
    stream.
    """
    num_streams, stub_of = 0, PeerAuth.stub

    def stub(trust: PeerAuth, channel: grpc.aio.Channel, incarnation: Incarnation) -> Any:
        made: Any = stub_of(trust, channel, incarnation)
        follow = made.StreamHandoff

        def ends_the_first_time() -> Any:
            nonlocal num_streams
            num_streams += 1
            call = follow()
            if num_streams == 1:
                call.cancel()
            return call

        made.StreamHandoff = ends_the_first_time
        return made

    monkeypatch.setattr(PeerAuth, "stub", stub)
    producer, consumer = await nodes.start(), await nodes.start()
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 12))
    assert await consumer.client.end_of(key) == Finished(key, FinishReason.LENGTH, 12, 0)
    assert num_streams == 2
    await settled(producer, consumer)


async def test_kv_is_read_from_the_advertised_address(nodes: Nodes) -> None:
    """The address belongs to a proxy that only forwards bytes."""
    target = ""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        there, onward = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pump(reader, onward), _pump(there, writer))

    proxy = await asyncio.start_server(carry, "127.0.0.1", 0)
    outside = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    port = free_port()
    target = f"127.0.0.1:{port}"
    producer = await nodes.start(worker=WorkerConfig(port=port, advertise_address=outside))
    consumer = await nodes.start()
    assert producer.worker.me.address == outside
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, PROMPT, 12))
    assert await consumer.client.end_of(key) == Finished(key, FinishReason.LENGTH, 12, 0)
    proxy.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    writer.close()


def test_a_failed_stream_ends_and_wakes_its_writer() -> None:
    stream = ConsumerStream(WorkerRef(WorkerId("consumer"), Incarnation(1), "h:1"))
    failure = ValueError("planted")
    stream.end(failure)
    assert stream.failure is failure and stream.is_over and stream.wake.is_set()
