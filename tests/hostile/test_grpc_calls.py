"""Test hostile gRPC clients: wrong messages, huge metadata, unknown methods, other protocols, floods, and streams that
are never read. Each ends with a status, nothing is held, and the next call is answered."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from tandem.wire.gen import inference_pb2 as pb
from tests.effort import scaled
from tests.hostile.bodies import SURFACES
from tests.hostile.conftest import PATIENCE_S
from tests.hostile.surface import mutants
from tests.unit.gateway.conftest import Endless, Front

pytestmark = pytest.mark.slow
HELLO = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="Hello")], max_tokens=3)
SERVICE = "/tandem.v1.Inference/"
CODES = grpc.StatusCode
NUM_MUTANTS = 200
NUM_CALLS = 300
NUM_STREAMS = 16


@pytest.fixture(autouse=True)
def _answers_the_next_call(attacked: Front, stub: Any) -> Iterator[None]:
    yield
    attacked.instant()
    assert stub.Chat(HELLO, timeout=PATIENCE_S).usage.completion_tokens > 0


def code_of(channel: grpc.Channel, method: str, message: bytes = b"", **options: Any) -> grpc.StatusCode:
    """Send bytes as the message of a unary call, and return its status."""
    call = channel.unary_unary(method)
    try:
        call(message, timeout=PATIENCE_S, **options)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return CODES.OK


def test_methods_and_services_that_do_not_exist(channel: grpc.Channel) -> None:
    for method in ("Nothing", "chat", "Chat/", "../Chat", "Chat%00", "", "Watch"):
        assert code_of(channel, SERVICE + method) is CODES.UNIMPLEMENTED, method
    for method in ("/tandem.v1.Worker/Describe", "/tandem.v1.Worker/Submit", "/nothing/Chat", "//", "/"):
        assert code_of(channel, method) is CODES.UNIMPLEMENTED, method


def test_bytes_that_are_no_message(channel: grpc.Channel, caplog: pytest.LogCaptureFixture) -> None:
    for data in (b"\xff", b"\x0a\xff", b"\x0a\x05ab", bytes(100), b"\x08" + b"\x80" * 20, b"\x0b" * 50):
        for method in (SERVICE + "Chat", SERVICE + "Tokenize", "/grpc.health.v1.Health/Check"):
            assert code_of(channel, method, data) is CODES.INVALID_ARGUMENT, (method, data)
        with pytest.raises(grpc.RpcError) as error:
            list(channel.unary_stream(SERVICE + "StreamChat")(data, timeout=PATIENCE_S))
        assert error.value.code() is CODES.INVALID_ARGUMENT, data
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_messages_with_broken_fields(channel: grpc.Channel) -> None:
    allowed = {CODES.OK, CODES.INVALID_ARGUMENT, CODES.UNIMPLEMENTED, CODES.NOT_FOUND}
    methods = {b"c": "Chat", b"p": "Complete", b"t": "Tokenize"}
    for data in mutants(SURFACES["grpc-body"].seeds, scaled(NUM_MUTANTS)):
        code = code_of(channel, SERVICE + methods.get(data[:1], "Chat"), data[1:])
        assert code in allowed, (data, code)


def test_a_message_over_the_limit(channel: grpc.Channel) -> None:
    assert code_of(channel, SERVICE + "Chat", bytes(2 << 20)) is CODES.RESOURCE_EXHAUSTED


def test_huge_and_wrong_metadata(channel: grpc.Channel, attacked: Front) -> None:
    message = HELLO.SerializeToString()
    refused = (
        [("x", "y" * 100_000)],
        [(f"x-{number}", "y" * 100) for number in range(500)],
        [("x-tandem-lane", "fast")],
        [("x-tandem-disaggregation", "on")],
        [("x-tandem-explain", "2")],
        [("x-tandem-timing", "y")],
    )
    for metadata in refused:
        code = code_of(channel, SERVICE + "Chat", message, metadata=metadata)
        assert code in (CODES.RESOURCE_EXHAUSTED, CODES.INVALID_ARGUMENT), (metadata[0], code)
    odd = [
        ("x-request-id", "a" * 500),
        ("traceparent", "no trace"),
        ("x-bin", b"\0\xff" * 50),
        ("x-tandem-session", "s" * 4_000),
    ]
    assert code_of(channel, SERVICE + "Chat", message, metadata=odd) is CODES.OK


OTHER_PROTOCOLS = (
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000") * 2_000,  # empty SETTINGS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000008060000000000") + bytes(8) * 2_000,  # PING
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("ffffff010400000001") + bytes(1_000),  # a frame of 16 MB
    bytes(10_000),
    b"",
)


def test_clients_of_other_protocols_and_half_open_ones(attacked: Front) -> None:
    """The connections stay open meanwhile, as far as the server lets them."""
    held = []
    try:
        for sent in OTHER_PROTOCOLS * 10:
            link = socket.create_connection(("127.0.0.1", attacked.grpc_port), timeout=PATIENCE_S)
            held.append(link)
            with suppress(ConnectionError):
                link.sendall(sent)
        with grpc.insecure_channel(f"127.0.0.1:{attacked.grpc_port}") as channel:
            assert code_of(channel, SERVICE + "Chat", HELLO.SerializeToString()) is CODES.OK
    finally:
        for link in held:
            link.close()


def test_a_flood_of_calls_is_answered(stub: Any) -> None:
    calls = [stub.Chat.future(HELLO, timeout=PATIENCE_S) for _ in range(scaled(NUM_CALLS))]
    for call in calls:
        assert call.result().usage.completion_tokens > 0


def test_streams_that_are_never_read_end_with_their_clients(attacked: Front, stub: Any) -> None:
    """The gateway holds a bounded part of each, so that an endless answer does not run on."""
    streams: list[Endless] = []

    def script(_request: Any) -> Endless:
        streams.append(Endless())
        return streams[-1]

    attacked.dispatch.script = script
    calls = [stub.StreamChat(HELLO) for _ in range(NUM_STREAMS)]
    deadline = time.monotonic() + PATIENCE_S
    while len(streams) < len(calls):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for call in calls:
        call.cancel()
    for stream in streams:
        assert stream.closed.wait(PATIENCE_S) and stream.num_closes == 1
