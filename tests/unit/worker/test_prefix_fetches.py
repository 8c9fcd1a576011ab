"""Test prefixes that one worker reads from another's cache, over real gRPC and the local transport: fetched tokens are
not computed, and after any failure the job is computed locally with the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.events import Cancelled, Finished, FinishReason, KVReceived, Token
from tandem.core.ids import BlockHash, HandoffId, HandoffKey, Incarnation, JobKey, WorkerRef
from tandem.core.request import GenerateJob, PrefillJob, RemotePrefix, Request, ResumeJob
from tandem.engine.effects import FollowHandoff
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS, RemotePrefixRequest
from tandem.worker.kv.producer_session import ProducerSession
from tests.e2e.client import PATIENCE_S, new_request
from tests.unit.worker.conftest import Gate, Node, Nodes, pace, settled
from tests.unit.worker.fake_model import MODEL, continuation

PROMPT = list(range(1, 60))
NUM_BLOCKS = 14
"""Number of PROMPT's tokens that a hit may cover."""
QUICK = HandoffConfig(lease_s=1.0, pull_timeout_s=0.5, drain_timeout_s=1.0)
pytestmark = pytest.mark.usefixtures("patient_fetches")


async def warm(node: Node, prompt: Sequence[int] = PROMPT) -> None:
    """Let a worker cache a prompt."""
    key = await node.client.generate(new_request(MODEL, prompt, 1))
    await node.client.end_of(key)


def prefix_at(source: WorkerRef, request: Request, num_blocks: int = NUM_BLOCKS) -> RemotePrefix:
    return RemotePrefix(handoff=HandoffId(f"loan-{request.id}"), source=source, num_blocks=num_blocks)


async def fetch_prefix(node: Node, source: WorkerRef, request: Request, num_blocks: int = NUM_BLOCKS) -> JobKey:
    job = GenerateJob(request=request, attempt=1, prefix=prefix_at(source, request, num_blocks))
    await node.client.submit(job)
    return job.key


def num_cached(node: Node, key: JobKey) -> int | None:
    return next(e.num_cached_tokens for e in node.client.events[key] if isinstance(e, Token))


async def ends_right(node: Node, key: JobKey, prompt: Sequence[int], num_cached_tokens: int) -> None:
    """Check the job's tokens and the number of tokens that it reports as cached."""
    end = await node.client.end_of(key)
    tokens = node.client.tokens(key)
    assert end == Finished(key, FinishReason.LENGTH, len(tokens), num_cached_tokens)
    assert tokens == continuation(prompt, len(tokens)) and num_cached(node, key) == num_cached_tokens


@pytest.mark.parametrize("has_digests", [True, False])
async def test_a_remote_prefix_is_read_and_not_computed(nodes: Nodes, has_digests: bool) -> None:
    handoff = HandoffConfig(digests=has_digests)
    producer, consumer = await nodes.start(handoff=handoff), await nodes.start(handoff=handoff)
    await warm(producer)
    computed: list[int] = []
    consumer.executor.before_step = lambda plan: computed.append(plan.num_tokens)
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(consumer, key, PROMPT, NUM_BLOCKS * 4)
    assert sum(computed) == len(PROMPT) - NUM_BLOCKS * 4 + 2
    pulled = consumer.client.pulled(key)
    assert isinstance(pulled, KVReceived) and pulled.source == producer.worker.me and pulled.busy_s > 0
    assert (pulled.num_blocks, pulled.num_cached_tokens, pulled.num_bytes) == (NUM_BLOCKS, 0, NUM_BLOCKS * 64)
    assert consumer.client.load.num_remote_hit_tokens == NUM_BLOCKS * 4
    # It is cached like any prefix, by name: the next job needs no fetch, and a third worker reads from the second.
    again = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(consumer, again, PROMPT, NUM_BLOCKS * 4)
    assert consumer.client.pulled(again) is None
    third = await nodes.start(handoff=handoff)
    key = await fetch_prefix(third, consumer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(third, key, PROMPT, NUM_BLOCKS * 4)
    await settled(producer, consumer, third)


async def test_only_missing_blocks_are_read(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    await warm(producer)
    await warm(consumer, [*PROMPT[:21], 7, 7, 7, 7])
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(consumer, key, PROMPT, NUM_BLOCKS * 4)
    pulled = consumer.client.pulled(key)
    assert pulled is not None and (pulled.num_blocks, pulled.num_cached_tokens) == (NUM_BLOCKS - 5, 20)
    await settled(producer, consumer)


@pytest.mark.parametrize("num_there", [0, 6])
async def test_a_source_with_fewer_blocks_serves_those(nodes: Nodes, num_there: int) -> None:
    """The source evicted the rest after the router's look-up."""
    producer, consumer = await nodes.start(), await nodes.start()
    await warm(producer, [*PROMPT[: 4 * num_there], 9, 9, 9, 9, 9])
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(consumer, key, PROMPT, 4 * num_there)
    await settled(producer, consumer)


async def test_another_tenant_s_prefix_is_not_found(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    await warm(producer)
    request = replace(new_request(MODEL, PROMPT, 3), cache_salt="other")
    await ends_right(consumer, await fetch_prefix(consumer, producer.worker.me, request), PROMPT, 0)
    await settled(producer, consumer)


async def test_a_source_that_is_gone_costs_no_request(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.kv.producer_session.BACKOFF_S", 0.005)
    consumer = await nodes.start(handoff=QUICK)
    gone = replace(consumer.worker.me, id=type(consumer.worker.me.id)("gone"), address="127.0.0.1:9")
    older = replace(consumer.worker.me, incarnation=Incarnation(1))
    for first_token, source in enumerate((gone, older)):
        request = new_request(MODEL, [first_token, *PROMPT], 3)
        await ends_right(consumer, await fetch_prefix(consumer, source, request), request.prompt_tokens, 0)
    await settled(consumer)


async def test_a_worker_that_is_to_read_from_itself_computes(nodes: Nodes) -> None:
    node = await nodes.start(handoff=QUICK)
    key = await fetch_prefix(node, node.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(node, key, PROMPT, 0)
    await settled(node)


async def test_a_read_that_stands_still_is_given_up_while_its_blocks_wait_for_it(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start(handoff=QUICK)
    await warm(producer)
    consumer.transport.gate.clear()
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    other = await consumer.client.generate(new_request(MODEL, [7, *PROMPT], 3))
    await consumer.client.under_read()
    # No other job waits behind it.
    await ends_right(consumer, other, [7, *PROMPT], 0)
    assert not consumer.client.events.get(key)
    await ends_right(consumer, key, PROMPT, 0)
    assert (await consumer.client.books()).num_reading_blocks == NUM_BLOCKS
    consumer.transport.gate.set()
    await settled(producer, consumer)


async def test_a_source_that_ends_in_the_middle_of_a_read(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start(handoff=QUICK)
    await warm(producer)
    consumer.transport.gate.clear()
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await consumer.client.under_read()
    await producer.client.__aexit__(None, None, None)
    nodes.nodes.remove(producer)
    await producer.worker.stop()
    await ends_right(consumer, key, PROMPT, 0)
    consumer.transport.gate.set()
    await settled(consumer)


@pytest.mark.parametrize("state", ["asked", "under read"])
async def test_cancel_and_a_newer_attempt_end_the_prefix_fetch_on_both_sides(nodes: Nodes, state: str) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    await warm(producer)
    gate = Gate(producer.executor, lambda plan: state == "asked" and bool(getattr(plan, "digests", ())))
    if state == "under read":
        consumer.transport.gate.clear()
    request = new_request(MODEL, PROMPT, 3)
    key = await fetch_prefix(consumer, producer.worker.me, request)
    if state == "under read":
        await consumer.client.under_read()
    else:
        await asyncio.to_thread(gate.entered.wait)
    newer = GenerateJob(request=request, attempt=2, prefix=prefix_at(producer.worker.me, request))
    await consumer.client.submit(newer)
    assert await consumer.client.end_of(key) == Cancelled(key)
    if state == "under read":
        await consumer.client.under_read()
        await consumer.client.cancel(newer.key)
        assert await consumer.client.end_of(newer.key) == Cancelled(newer.key)
    gate.open()
    consumer.transport.gate.set()
    if state == "asked":
        await ends_right(consumer, newer.key, PROMPT, NUM_BLOCKS * 4)
    await settled(producer, consumer)


async def test_a_consumer_without_room_computes(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start(num_blocks=24)
    await warm(producer)
    pace(consumer.executor)
    long = [7, *PROMPT[:50]]
    running = await consumer.client.generate(new_request(MODEL, long, 40))
    await consumer.client.num_tokens(running, 1)
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(consumer, key, PROMPT, 0)
    await ends_right(consumer, running, long, 0)
    assert consumer.client.load.num_remote_hit_tokens == 0
    await settled(producer, consumer)


async def test_a_prefill_reads_and_offers_what_it_read(nodes: Nodes) -> None:
    source, producer, consumer = await nodes.start(), await nodes.start(), await nodes.start()
    await warm(source)
    request = new_request(MODEL, PROMPT, 8)
    handoff = HandoffId("h")
    resume = ResumeJob(request=request, attempt=1, handoff=handoff, source=producer.worker.me)
    prefix = prefix_at(source.worker.me, request)
    prefill = PrefillJob(request=request, attempt=1, handoff=handoff, prefix=prefix)
    await consumer.client.submit(resume)
    await producer.client.submit(prefill)
    assert await producer.client.end_of(prefill.key) == Finished(prefill.key, None, 1, NUM_BLOCKS * 4)
    await ends_right(consumer, resume.key, PROMPT, NUM_BLOCKS * 4)
    pulled = consumer.client.pulled(resume.key)
    assert pulled is not None and pulled.source is None and pulled.num_blocks == 15
    await settled(source, producer, consumer)


async def test_a_draining_worker_still_serves_prefixes(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    await warm(producer)
    running = await producer.client.generate(new_request(MODEL, [3, 4], 400))
    await producer.client.num_tokens(running, 1)
    draining = asyncio.create_task(producer.worker.drain(20.0))
    await producer.client.until(lambda: producer.client.load.draining)
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(consumer, key, PROMPT, NUM_BLOCKS * 4)
    await producer.client.cancel(running)
    await draining
    await settled(producer, consumer)


@pytest.mark.parametrize("is_read_meanwhile", [False, True])
async def test_a_broken_stream_requests_its_prefix_fetches_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, is_read_meanwhile: bool
) -> None:
    """Blocks that were read before the stream is reopened are not released by name: their lease expires."""
    producer = replace(QUICK, lease_s=0.4) if is_read_meanwhile else QUICK
    producer, consumer = await nodes.start(handoff=producer), await nodes.start()
    await warm(producer)
    consumer.transport.gate.clear()
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    await consumer.client.under_read()
    served_again = asyncio.Event()
    send = producer.worker._handoffs.send
    monkeypatch.setattr(producer.worker._handoffs, "send", lambda effect: (send(effect), served_again.set()))
    producer.worker._handoffs.close()
    if not is_read_meanwhile:
        await asyncio.wait_for(served_again.wait(), PATIENCE_S)
    consumer.transport.gate.set()
    await ends_right(consumer, key, PROMPT, NUM_BLOCKS * 4)
    await settled(producer, consumer)


async def test_the_blocks_of_one_message_are_bounded(nodes: Nodes) -> None:
    """A reopened stream requests many long prefixes again."""
    node = await nodes.start()
    link = ProducerSession(node.worker.me, node.worker._producers.context)
    half = RemotePrefixRequest(0, (BlockHash(b"x" * 16),) * (MAX_REMOTE_PREFIX_BLOCKS // 2))
    requests: dict[str, RemotePrefixRequest | None] = {"a": half, "b": half, "c": None, "d": half, "e": None}
    for name, prefix_request in requests.items():
        link.carry_out(FollowHandoff(link.source, HandoffKey(HandoffId(name), 1), prefix_request))
    messages = [link._next_message(), link._next_message()]
    batches = [[*(b.key.handoff for b in m.prefix_request), *(key.handoff for key in m.follow)] for m in messages]
    assert batches == [["a", "b", "c"], ["d", "e"]]
    assert max(message.ByteSize() for message in messages) < 2**19
