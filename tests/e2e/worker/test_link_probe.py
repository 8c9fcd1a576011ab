"""Test worker processes that measure the links between them: over both transports, between one rank and two, and with
one worker dead or stopped in the middle.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tandem.core.ids import WorkerRef
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.kv_codec import encode_worker
from tests.e2e.client import Client
from tests.e2e.cluster import WorkerProcess
from tests.e2e.worker.conftest import Start

Two = tuple[WorkerProcess, WorkerProcess]


async def measure(consumer: Client, source: WorkerRef, num_bytes: int = 0) -> pb.ProbeLinkReply:
    return await consumer.stub.ProbeLink(
        pb.ProbeLinkRequest(source=encode_worker(source), num_bytes=num_bytes), timeout=60
    )


@pytest.fixture(scope="module", params=["nixl", pytest.param("local", marks=pytest.mark.nightly)])
def two(request: pytest.FixtureRequest, start: Start) -> Iterator[Two]:
    kind = request.param
    workers = start(f"producer-{kind}", "prefill", kind), start(f"consumer-{kind}", "decode", kind)
    yield workers
    for worker in workers:
        assert worker.exit_code is None, f"{worker.name} ended by itself: {worker.log}"
        assert worker.stop() == 0, worker.log


async def test_a_probe_names_the_link_checks_bytes_and_leaves_nothing(two: Two) -> None:
    producer, consumer = two
    async with Client(consumer.ref) as client, Client(producer.ref) as other:
        before = await client.books(), await other.books()
        reply = await measure(client, producer.ref, 40 << 20)
        assert not reply.HasField("refusal"), reply
        report = reply.report
        assert report.link_type == "shared_memory", report.evidence
        assert report.num_bytes >= 40 << 20 and report.seconds > 0 and not report.problem
        assert (await client.books(), await other.books()) == before, "no engine knows of it"
        await client.until(lambda: any(update.links for update in client.updates))
        links = [link for update in client.updates for link in update.links]
        assert report in links
        described = await client.stub.Describe(pb.DescribeRequest())
        assert list(described.links) == links[-1:]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "evidence"), [("nixl", "network interfaces received"), ("tcp", "connections of its own")]
)
async def test_a_link_over_tcp_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, evidence: str
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    consumer = start(f"consumer-over-{kind}", "decode", kind)
    producer = start(f"producer-over-{kind}", "prefill", kind)
    async with Client(consumer.ref) as client, Client(producer.ref):
        reply = await measure(client, producer.ref, 40 << 20)
        assert (reply.report.link_type, reply.refusal.message) == ("tcp", ""), reply
        assert evidence in reply.report.evidence


async def test_a_worker_does_not_measure_itself_or_who_is_not_there(two: Two) -> None:
    producer, consumer = two
    async with Client(consumer.ref) as client:
        for source, kind in (
            (consumer.ref, "invalid_request"),
            (WorkerRef(producer.ref.id, producer.ref.incarnation, "127.0.0.1:1"), "worker_lost"),
            (WorkerRef(producer.ref.id, type(producer.ref.incarnation)(7), producer.ref.address), "worker_lost"),
        ):
            reply = await measure(client, source)
            assert (reply.refusal.kind, reply.HasField("report")) == (kind, False)


@pytest.mark.nightly
@pytest.mark.parametrize(("num_producers", "num_consumers"), [(2, 1), (1, 2)])
async def test_ranks_are_measured_together(start: Start, num_producers: int, num_consumers: int) -> None:
    name = f"{num_producers}-{num_consumers}"
    producer = start(f"producer-{name}", "prefill", "local", "--tensor-parallel", str(num_producers))
    consumer = start(f"consumer-{name}", "decode", "local", "--tensor-parallel", str(num_consumers))
    async with Client(consumer.ref) as client, Client(producer.ref):
        reply = await measure(client, producer.ref, 20 << 20)
        assert not reply.HasField("refusal"), reply
        assert reply.report.num_bytes >= 20 << 20


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["local", "nixl", "tcp"])
async def test_a_source_that_dies_in_the_middle_ends_it_once_and_leaves_nothing(start: Start, kind: str) -> None:
    producer, consumer = start(f"dying-{kind}", "prefill", kind), start(f"reader-{kind}", "decode", kind)
    async with Client(consumer.ref) as client:
        assert (await measure(client, producer.ref, 1 << 20)).report.num_bytes >= 1 << 20
        before = await client.books()
        measurement = asyncio.create_task(measure(client, producer.ref, 1 << 40))
        await asyncio.sleep(0.3)
        assert not measurement.done(), await measurement
        producer.signal(signal.SIGKILL)
        reply = await measurement
        assert reply.refusal.kind == "kv_lost", reply
        assert await client.books() == before
        new = start(f"dying-{kind}", "prefill", kind)
        reply = await measure(client, new.ref)
        assert reply.report.num_bytes > 0, "the consumer is as good as before"
