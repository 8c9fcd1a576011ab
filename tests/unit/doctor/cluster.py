"""Workers that only describe themselves and measure, over real gRPC; never runs a job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.doctor.workers import WorkerFacts
from tandem.stores.worker_record import WorkerRecord
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from tandem.wire.peer_auth import PeerAuth


def worker(
    name: str, role: str = "mixed", fingerprint: str = "f" * 32, model: str = "smol", **more: Any
) -> WorkerFacts:
    ref, known = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1"), {"transport": "nixl", "layout": "3h x 30l"}
    return WorkerFacts(ref, role, model, fingerprint, **{**known, **more})


class Double(WorkerServicer):
    """`links`: producer -> what measuring it answers. `asked`: the producers, in order."""

    def __init__(self, said: pb.DescribeReply, links: Mapping[str, pb.ProbeLinkReply] | None = None) -> None:
        self.said = said
        self.links = links or {}
        self.asked: list[str] = []

    async def Describe(self, request: Any, context: Any) -> pb.DescribeReply:
        return self.said

    async def ProbeLink(self, request: Any, context: Any) -> pb.ProbeLinkReply:
        self.asked.append(request.source.id)
        if request.source.id not in self.links:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return self.links[request.source.id]


class Listed:
    """What the registry would say."""

    def __init__(self, records: Sequence[WorkerRecord]) -> None:
        self.records = tuple(records)
        self._trust = PeerAuth("doctor")

    async def all(self) -> tuple[WorkerRecord, ...]:
        return self.records

    @asynccontextmanager
    async def stub(self, worker: WorkerRef) -> AsyncIterator[WorkerStub]:
        async with self._trust.open_channel(worker.address) as channel:
            yield self._trust.stub(channel, worker.incarnation)


@asynccontextmanager
async def running(doubles: Mapping[str, Double]) -> AsyncIterator[Listed]:
    """All of them serve."""
    async with AsyncExitStack() as stack:
        records = []
        for name, double in doubles.items():
            server = grpc.aio.server()
            add_WorkerServicer_to_server(double, server)  # type: ignore[no-untyped-call]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            records.append(record(name, f"127.0.0.1:{port}"))
        yield Listed(records)


def record(name: str, address: str) -> WorkerRecord:
    return WorkerRecord(
        worker=WorkerRef(WorkerId(name), Incarnation(1), address),
        pool="mixed",
        model="smol",
        fingerprint="f" * 32,
        layout="3h x 30l",
        max_model_len=1,
        bundle_digest="",
    )
