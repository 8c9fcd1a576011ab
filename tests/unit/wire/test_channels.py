"""Test the shared gRPC options on a real server and channel."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from tandem.wire.channels import MAX_MESSAGE_BYTES, SERVER_OPTIONS, open_channel
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server

Context = grpc.aio.ServicerContext[worker_pb2.DescribeRequest, worker_pb2.DescribeReply]


class Describing(WorkerServicer):
    """Reply with a bundle of 32 MiB, eight times gRPC's default limit."""

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeReply:
        return worker_pb2.DescribeReply(bundle=worker_pb2.TokenizerBundle(tokenizer_json=bytes(MAX_MESSAGE_BYTES // 2)))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(Describing(), server)
    bound = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield bound
    await server.stop(None)


async def test_large_messages_pass_and_proxies_are_ignored(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        reply = await WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=30)
    assert len(reply.bundle.tokenizer_json) == MAX_MESSAGE_BYTES // 2


async def test_a_second_server_cannot_share_the_port(port: int) -> None:
    second = grpc.aio.server(options=SERVER_OPTIONS)
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")
