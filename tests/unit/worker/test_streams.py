"""Test the edges of the worker's service: malformed messages, other models, discovery, and Describe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from tandem.core.config import RedisConfig
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, WorkerId, WorkerRef
from tandem.stores.worker_registry import WorkerRegistry
from tandem.wire.gen import kv_pb2
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.kv_codec import decode_peer, decode_worker, encode_handoff_key, encode_worker
from tandem.wire.worker_codec import decode_load
from tandem.worker.gateways import service
from tests.e2e.client import new_request
from tests.unit.worker.conftest import Nodes, held_in_a_step, until
from tests.unit.worker.fake_model import MODEL

CONSUMER = WorkerRef(WorkerId("consumer"), Incarnation(5), "127.0.0.1:1")


async def follow(stub: WorkerStub, *messages: kv_pb2.StreamHandoffRequest) -> list[kv_pb2.StreamHandoffUpdate]:
    """Send messages, read until the last is answered or the stream fails."""
    call = stub.StreamHandoff()  # type: ignore[call-arg]  # the stubs know only calls with an iterator
    for message in messages:
        await call.write(message)
    updates: list[kv_pb2.StreamHandoffUpdate] = []
    async with asyncio.timeout(10):
        async for update in call:
            updates.append(update)
            if update.renewed_sequence == messages[-1].sequence:
                break
    call.cancel()
    return updates


def first(*release: kv_pb2.HandoffKey, fingerprint: str = "f00d") -> kv_pb2.StreamHandoffRequest:
    consumer = encode_worker(CONSUMER)
    return kv_pb2.StreamHandoffRequest(consumer=consumer, fingerprint=fingerprint, sequence=1, release=release)


async def test_a_follower_with_another_model_is_refused(nodes: Nodes) -> None:
    node = await nodes.start()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await follow(node.client.stub, first(fingerprint="beef"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("where", ["consumer", "first", "second"])
async def test_a_malformed_follow_ends_the_stream_and_nothing_else(nodes: Nodes, where: str) -> None:
    node = await nodes.start()
    bad = kv_pb2.StreamHandoffRequest(fingerprint="f00d", renew=[kv_pb2.HandoffKey()], sequence=2)
    messages = {"consumer": [bad], "first": [first(kv_pb2.HandoffKey())], "second": [first(), bad]}[where]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await follow(node.client.stub, *messages)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert node.worker.healthy() is None


async def test_ended_hand_offs_are_reported_before_the_reply(nodes: Nodes) -> None:
    node = await nodes.start()
    key = encode_handoff_key(HandoffKey(HandoffId("h"), 1))
    released = first(key)
    again = kv_pb2.StreamHandoffRequest(follow=[key], renew=[key], sequence=2)
    updates = await follow(node.client.stub, released, again)
    ended = [end.key.handoff for update in updates for end in update.ended]
    assert ended and set(ended) == {"h"}
    assert updates[-1].renewed_sequence == 2 and updates[-1].lease_ms == 10_000


async def test_a_consumers_messages_do_not_take_a_step_each(nodes: Nodes) -> None:
    """The engine gets all messages while one step runs; one reply per step would take 20 steps."""
    node = await nodes.start()
    gate, _ = await held_in_a_step(node)
    keys = [encode_handoff_key(HandoffKey(HandoffId(f"h{n}"), 1)) for n in range(20)]
    messages = [kv_pb2.StreamHandoffRequest(follow=[key], sequence=n) for n, key in enumerate(keys, 2)]
    answers = asyncio.create_task(follow(node.client.stub, first(), *messages))
    try:
        await until(lambda: "21 waiting" in repr(node.worker._driver))
    finally:
        gate.open()
    assert (await answers)[-1].renewed_sequence == 21


async def test_malformed_calls_are_refused(nodes: Nodes) -> None:
    node = await nodes.start()
    stub = node.client.stub
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: stub.Cancel(pb.CancelRequest(keys=[pb.JobKey()])),
        lambda: stub.OfferMigration(pb.OfferMigrationRequest(keys=[pb.JobKey()])),
        lambda: stub.Release(pb.ReleaseRequest()),
        lambda: stub.Watch(pb.WatchRequest()).read(),
        lambda: stub.Watch(pb.WatchRequest(gateway="g", positions=[pb.WatchPosition()])).read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_describe_returns_the_workers_facts(nodes: Nodes) -> None:
    node = await nodes.start()
    description = await node.client.stub.Describe(pb.DescribeRequest(with_bundle=True))
    assert decode_worker(description.worker) == node.worker.me == decode_peer(description.transport).worker
    facts = (description.model, description.fingerprint, description.transport_kind, description.pool)
    assert facts == (MODEL, "f00d", "local", "mixed")
    assert description.bundle.tokenizer_json == b"{}" and description.bundle_digest
    assert description.max_num_seqs == 8
    assert decode_load(description.load).num_free_blocks == description.books.num_free_blocks == 512
    assert not (await node.client.stub.Describe(pb.DescribeRequest())).HasField("bundle")


async def test_describe_does_not_wait_for_a_long_step(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BOOKS_S", 0.05)
    node = await nodes.start()
    gate, _ = await held_in_a_step(node)
    description = await node.client.stub.Describe(pb.DescribeRequest(), timeout=10)
    gate.open()
    assert not description.HasField("books")
    assert decode_worker(description.worker) == node.worker.me


async def test_an_abandoned_submit_leaves_no_job(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BOOKS_S", 0.05)
    node = await nodes.start()
    gate, short = await held_in_a_step(node)
    given_up = new_request(MODEL, [4, 5, 6], 900)
    waiting = asyncio.create_task(node.client.generate(given_up))
    # By the time that a later call is answered, the worker has begun to handle this one.
    await node.client.stub.Describe(pb.DescribeRequest(), timeout=10)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gate.open()
    await node.client.end_of(short)
    await node.client.settled()


@pytest.mark.redis
async def test_a_worker_registers_while_it_lives(nodes: Nodes, redis_url: str) -> None:
    redis = RedisConfig(url=redis_url, namespace="test-worker")
    node = await nodes.start(redis=redis)
    registry = WorkerRegistry(redis.url, redis.namespace)
    async with asyncio.timeout(10):
        while not (records := await registry.list()):
            await asyncio.sleep(0.02)
    assert [(r.worker, r.pool, r.model) for r in records] == [(node.worker.me, "mixed", MODEL)]
    await node.worker.stop()
    assert await registry.list() == ()
    await registry.close()


async def test_an_unreachable_redis_stops_no_job(nodes: Nodes) -> None:
    node = await nodes.start(redis=RedisConfig(url="redis://127.0.0.1:1/0"))
    key = await node.client.generate(new_request(MODEL, [1, 2, 3], 4))
    await node.client.end_of(key)
    assert node.worker.healthy() is None
