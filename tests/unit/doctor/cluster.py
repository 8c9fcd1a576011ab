"""Test workers over real gRPC that only describe themselves and answer link probes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.doctor.workers import WorkerFacts
from tandem.stores.worker_registry import WorkerRecord
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from tandem.wire.peer_auth import PeerAuth


def worker(
    name: str, role: str = "mixed", fingerprint: str = "f" * 32, model: str = "smol", **more: Any
) -> WorkerFacts:
    ref, known = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1"), {"transport": "nixl", "layout": "3h x 30l"}
    return WorkerFacts(ref, role, model, fingerprint, **{**known, **more})


class Double(WorkerServicer):
    """Worker with scripted replies. `links`: producer -> its probe reply. `probed`: probed producers, in order."""

    def __init__(self, description: pb.DescribeReply, links: Mapping[str, pb.ProbeLinkReply] | None = None) -> None:
        self.description = description
        self.links = links or {}
        self.probed: list[str] = []

    async def Describe(self, request: Any, context: Any) -> pb.DescribeReply:
        return self.description

    async def ProbeLink(self, request: Any, context: Any) -> pb.ProbeLinkReply:
        self.probed.append(request.source.id)
        if request.source.id not in self.links:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return self.links[request.source.id]


class Listed:
    """List of workers in place of the registry."""

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
    """Start all workers, and stop them at the end."""
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
