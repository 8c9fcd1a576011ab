"""What the client makes of a stream, whole or broken; nothing here depends on real time."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web

from loadtest.client.calls import greedy_call
from loadtest.client.client import MAX_EVENT_BYTES, Answer, Client, Refused, SseParser
from loadtest.client.endpoint import Endpoint, NoEndpoint, base_url, first_model
from loadtest.client.records import Record
from loadtest.client.workloads import BenchRequest
from tests.unit.loadtest.served import WHOLE, FakeTime, answer_whole, chunk, serving, stream, streaming

# ---- server-sent events


STREAM = b'data: {"a":1}\n\n: a comment\n\ndata:{"b":2}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_are_whole_wherever_the_bytes_are_cut(size: int) -> None:
    parser = SseParser()
    found = [event for at in range(0, len(STREAM), size) for event in parser.feed(STREAM[at : at + size])]
    assert found == EVENTS


@pytest.mark.parametrize("size", range(1, 20))
def test_a_carriage_return_of_the_data_is_kept_wherever_the_bytes_are_cut(size: int) -> None:
    stream = b"data: one\r\r\n\r\ndata: two\n\n"
    parser = SseParser()
    found = [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])]
    assert found == [b"one\r", b"two"]


def test_an_event_without_its_end_is_not_reported() -> None:
    assert list(SseParser().feed(b"data: half")) == []


def test_an_event_that_never_ends_is_given_up() -> None:
    parser = SseParser()
    with pytest.raises(ValueError, match="bytes"):
        for _ in range(3):
            list(parser.feed(b"x" * (MAX_EVENT_BYTES // 2)))


# ---- one answer


def test_every_token_of_a_chunk_gets_its_stamp() -> None:
    answer = Answer()
    answer.take(chunk(text="a", token_ids=[1]), 1.0)
    answer.take(chunk(text="", token_ids=[2]), 2.0)
    answer.take(chunk(text="bc", token_ids=[3, 4]), 3.0)
    answer.take(chunk(text="", token_ids=None, finish_reason="length"), 3.5)
    answer.take(b"[DONE]", 4.0)
    assert answer.tokens == [1, 2, 3, 4]
    assert answer.stamps_s == [1.0, 2.0, 3.0, 3.0]
    assert answer.problem(4) == ("", "")


def test_without_ids_a_chunk_is_one_arrival_and_usage_has_the_number_of_tokens() -> None:
    answer = Answer()
    answer.take(chunk(text="a"), 1.0)
    answer.take(chunk(text="bcd", finish_reason=None), 2.0)
    answer.take(msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}), 2.0)
    answer.take(b"[DONE]", 2.0)
    assert answer.stamps_s == [1.0, 2.0]
    assert answer.num_tokens == 5
    assert answer.problem(5) == ("", "")


def test_what_is_not_whole_is_a_problem() -> None:
    cut, short, lost = Answer(), Answer(), Answer()
    cut.take(chunk(text="a", token_ids=[1]), 1.0)
    assert cut.problem(1) == ("cut off", "the stream ended early")
    short.take(chunk(text="a", token_ids=[1], finish_reason="stop"), 1.0)
    short.take(b"[DONE]", 1.0)
    assert short.problem(2) == ("wrong length", "1 of 2 tokens, 'stop'")
    assert short.problem(2, is_exact=False) == ("", "")
    lost.take(chunk(text="a", token_ids=[1]), 1.0)
    lost.take(msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}), 1.0)
    lost.take(b"[DONE]", 1.0)
    assert lost.problem(2) == ("wrong length", "token ids are missing")


def test_an_error_event_refuses() -> None:
    with pytest.raises(Refused, match="overloaded"):
        Answer().take(b'{"error": {"message": "overloaded"}}', 0.0)


# ---- one call


async def send_one(endpoint: Endpoint, timeout_s: float = 20.0) -> Record:
    request = BenchRequest(name="a", group="g", prompt=(5, 6, 7), max_tokens=2)
    async with aiohttp.ClientSession() as session:
        client = Client(endpoint, session, FakeTime(), timeout_s)
        return await client.send(greedy_call(endpoint, request), 100.0, None)


async def test_a_body_requests_exact_greedy_answers() -> None:
    seen = []

    async def respond(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, *WHOLE)

    async with serving(respond) as endpoint:
        record = await send_one(endpoint)
    assert (record.error_kind, record.tokens, record.text) == ("", (1, 2), "ab")
    (body,) = seen
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (2, 0, True, True)
    assert (body["model"], body["flavour"]) == ("m", 1)


async def test_a_body_is_dropped_once_it_is_sent() -> None:
    """Of an open request, a long prompt would be most of what is held."""
    request = BenchRequest(name="a", group="g", prompt=(5,) * 9_000, max_tokens=2)
    async with serving(answer_whole) as endpoint, aiohttp.ClientSession() as session:
        call = greedy_call(endpoint, request)
        assert len(call.body) > 9_000
        await Client(endpoint, session, FakeTime()).send(call, 100.0, None)
    assert call.body == b""


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ((), "cut off", "the stream ended early"),
        (WHOLE[:1], "cut off", "the stream ended early"),
        ((WHOLE[0], b"[DONE]"), "wrong length", "1 of 2 tokens"),
        ((*WHOLE[:2], *WHOLE), "wrong length", "4 of 2 tokens"),
        ((b'{"choices": [], "usage": {"completion_tokens": 2}}', b"[DONE]"), "empty", "no token"),
        ((b'{"error": {"message": "no room"}}',), "error event", "no room"),
        ((WHOLE[0], b'{"error": {"message": "no room"}}'), "error event", "no room"),
        ((b"not json",), "garbage", "Decode"),
        ((b'{"choices": [{"token_ids": ["x"]}]}',), "garbage", "Validation"),
        ((b"\xff\xfe",), "garbage", ""),
    ],
)
async def test_a_broken_answer_is_an_error_in_its_record(events: tuple[bytes, ...], kind: str, message: str) -> None:
    async with serving(streaming(*events)) as endpoint:
        record = await send_one(endpoint)
    assert record.error_kind == kind
    assert message in record.error


@pytest.mark.parametrize("status", [400, 401, 429, 503])
async def test_a_refusal_is_an_error_in_its_record(status: int) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=b"slow down \xff")

    async with serving(respond) as endpoint:
        record = await send_one(endpoint)
    assert (record.error_kind, record.stamps_s) == (f"http {status}", ())
    assert f"Refused: {status}: slow down" in record.error


async def test_a_server_that_closes_early_is_an_error_in_its_record() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: " + WHOLE[0] + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(respond) as endpoint:
        record = await send_one(endpoint)
    assert record.error_kind in ("cut off", "connection lost")
    assert record.tokens == (1,)  # what came until then is known


@pytest.mark.parametrize("response_bytes", [b"", b"this is no HTTP at all\r\n\r\n"])
async def test_a_server_that_speaks_no_http_is_an_error_in_its_record(response_bytes: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(response_bytes)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        record = await send_one(Endpoint(url=f"http://127.0.0.1:{port}", model="m"))
    assert record.error_kind == "connection lost"


async def test_a_server_that_is_not_there_is_an_error_in_its_record() -> None:
    record = await send_one(Endpoint(url="http://127.0.0.1:9", model="m"))
    assert record.error_kind == "no connection"


async def test_a_missing_answer_is_an_error_in_its_record() -> None:
    never = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        await never.wait()
        return await stream(request, *WHOLE)

    async with serving(respond) as endpoint:
        record = await send_one(endpoint, timeout_s=0.05)
        never.set()
    assert record.error_kind == "timeout"


# ---- the endpoint


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_a_url_is_taken_with_and_without_its_version(url: str) -> None:
    assert base_url(url) == "http://a:1"


async def test_the_model_is_the_first_that_is_listed() -> None:
    async with serving(answer_whole) as endpoint:
        assert await first_model(endpoint.url) == "m"
        with pytest.raises(NoEndpoint, match="404"):
            await first_model(endpoint.url + "/nowhere")
    with pytest.raises(NoEndpoint):
        await first_model("http://127.0.0.1:9")
