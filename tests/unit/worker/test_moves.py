"""Test that sequences of a draining worker migrate to another, over real gRPC and the local transport."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind
from tandem.core.events import Finished, FinishReason
from tandem.core.ids import HandoffKey, JobKey
from tandem.core.request import Request, ResumeJob
from tandem.wire.gen import worker_pb2 as pb
from tests.e2e.client import new_request
from tests.unit.worker.conftest import Node, Nodes, pace, settled, until
from tests.unit.worker.fake_model import MODEL, continuation

PROMPT = list(range(1, 60))
NUM_TOKENS = 100
"""Number of tokens: at 20 ms each there is time to migrate."""
QUICK = HandoffConfig(lease_s=1.0, pull_timeout_s=5.0, drain_timeout_s=1.0)


async def offered(node: Node, key: JobKey, nth: int = 0) -> HandoffKey:
    await node.client.until(lambda: len(node.client.offers(key)) > nth)
    return node.client.offers(key)[nth]


def resume(request: Request, producer: Node, key: JobKey, offer: HandoffKey, attempt: int) -> ResumeJob:
    """Build the ResumeJob from what the gateway knows by now."""
    return ResumeJob(
        request=request,
        attempt=attempt,
        output_tokens=tuple(producer.client.tokens(key)),
        handoff=offer.handoff,
        offer_attempt=offer.attempt,
        source=producer.worker.me,
    )


@pytest.mark.slow
async def test_all_running_sequences_migrate(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    pace(producer.executor, 0.02)
    requests = [new_request(MODEL, [i, *PROMPT[:20]], NUM_TOKENS) for i in range(6)]
    keys = [await producer.client.generate(request) for request in requests]
    for key in keys:
        await producer.client.num_tokens(key, 3)
    draining = asyncio.ensure_future(producer.client.stub.Drain(pb.DrainRequest(timeout_ms=20_000)))
    jobs = []
    for key, request in zip(keys, requests, strict=True):
        job = resume(request, producer, key, await offered(producer, key), 2)
        await consumer.client.submit(job)
        jobs.append(job)
    reply = await draining
    assert (reply.num_left, reply.num_moved, reply.num_given_back) == (0, 6, 0)
    for key, job in zip(keys, jobs, strict=True):
        left = await producer.client.end_of(key)
        assert isinstance(left, Finished) and left.reason is None
        end = await consumer.client.end_of(job.key)
        assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == (FinishReason.LENGTH, NUM_TOKENS)
        right = continuation(job.request.prompt_tokens, NUM_TOKENS)
        assert producer.client.tokens(key) == right[: left.num_output_tokens]
        assert [*job.output_tokens, *consumer.client.tokens(job.key)] == right
        pulled = consumer.client.pulled(job.key)
        assert pulled is not None and pulled.num_bytes > 0
    await settled(producer, consumer)


@pytest.mark.slow
async def test_a_consumer_that_dies_leaves_the_sequence_to_its_producer(nodes: Nodes) -> None:
    producer, lost, heir = await nodes.start(handoff=QUICK), await nodes.start(), await nodes.start()
    pace(producer.executor, 0.02)
    request = new_request(MODEL, PROMPT, 450)
    key = await producer.client.generate(request)
    await producer.client.num_tokens(key, 3)
    draining = asyncio.ensure_future(producer.client.stub.Drain(pb.DrainRequest(timeout_ms=20_000)))
    lost.transport.gate.clear()
    await lost.client.submit(resume(request, producer, key, await offered(producer, key), 2))
    while not (await producer.client.books()).num_leases:
        await asyncio.sleep(0.01)
    stopping = asyncio.ensure_future(lost.worker.stop())
    # The engine ends first: otherwise the consumer might take all sequences while it stops.
    await until(lambda: lost.worker.healthy() is not None)
    lost.transport.gate.set()
    await stopping
    job = resume(request, producer, key, await offered(producer, key, 1), 3)
    await heir.client.submit(job)
    assert isinstance(await heir.client.end_of(job.key), Finished)
    assert [*job.output_tokens, *heir.client.tokens(job.key)] == continuation(PROMPT, 450)
    assert (await draining).num_moved == 1


async def test_queued_jobs_are_requeued_at_once(nodes: Nodes) -> None:
    node = await nodes.start()
    pace(node.executor)
    keys = [await node.client.generate(new_request(MODEL, [i, *PROMPT], 900)) for i in range(9)]
    await node.client.num_tokens(keys[0], 1)
    reply = await node.client.stub.Drain(pb.DrainRequest(timeout_ms=50))
    given_back = [key for key in keys if node.client.ends(key)]
    assert reply.num_left == len(keys) - len(given_back) and reply.num_given_back == len(given_back) > 0
    for key in given_back:
        await node.client.failure(key, ErrorKind.DRAINING)
