"""The client against a server in this process that does what a test tells it; nothing here depends on real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from loadtest.client import Answer, Client, Endpoint, Refused, SseParser
from loadtest.workloads import Ask, Workload


def ask(name: str, due_s: float = 0.0, max_tokens: int = 2) -> Ask:
    return Ask(name=name, group="g", prompt=(5, 6, 7), max_tokens=max_tokens, due_s=due_s)


def workload(*asks: Ask, is_sequential: bool = False) -> Workload:
    return Workload(name="w", seed=0, turn=0, asks=asks, is_sequential=is_sequential)


# ---- server-sent events


STREAM = b'data: {"a":1}\n\n: a comment\n\ndata:{"b":2}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_come_whole_wherever_the_bytes_are_cut(size: int) -> None:
    parser = SseParser()
    found = [event for at in range(0, len(STREAM), size) for event in parser.feed(STREAM[at : at + size])]
    assert found == EVENTS


def test_an_event_without_its_end_is_not_told() -> None:
    assert list(SseParser().feed(b"data: half")) == []


# ---- one answer


def chunk(**choice: object) -> bytes:
    return msgspec.json.encode({"choices": [choice]})


def test_every_token_of_a_chunk_gets_its_stamp() -> None:
    answer = Answer()
    answer.take(chunk(text="a", token_ids=[1]), 1.0)
    answer.take(chunk(text="", token_ids=[2]), 2.0)
    answer.take(chunk(text="bc", token_ids=[3, 4]), 3.0)
    answer.take(chunk(text="", token_ids=None, finish_reason="length"), 3.5)
    answer.take(b"[DONE]", 4.0)
    assert answer.tokens == [1, 2, 3, 4]
    assert answer.stamps_s == [1.0, 2.0, 3.0, 3.0]
    assert answer.problem(4) == ""


def test_without_ids_a_chunk_is_one_arrival_and_usage_says_how_many_tokens() -> None:
    answer = Answer()
    answer.take(chunk(text="a"), 1.0)
    answer.take(chunk(text="bcd", finish_reason=None), 2.0)
    answer.take(msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}), 2.0)
    answer.take(b"[DONE]", 2.0)
    assert answer.stamps_s == [1.0, 2.0]
    assert answer.num_tokens == 5
    assert answer.problem(5) == ""


def test_what_is_not_whole_is_a_problem() -> None:
    cut, short, lost = Answer(), Answer(), Answer()
    cut.take(chunk(text="a", token_ids=[1]), 1.0)
    assert cut.problem(1) == "the stream ended early"
    short.take(chunk(text="a", token_ids=[1], finish_reason="stop"), 1.0)
    short.take(b"[DONE]", 1.0)
    assert short.problem(2) == "1 of 2 tokens, 'stop'"
    lost.take(chunk(text="a", token_ids=[1]), 1.0)
    lost.take(msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}), 1.0)
    lost.take(b"[DONE]", 1.0)
    assert lost.problem(2) == "token ids are missing"


def test_an_error_event_refuses() -> None:
    with pytest.raises(Refused, match="overloaded"):
        Answer().take(b'{"error": {"message": "overloaded"}}', 0.0)


# ---- the schedule


class FakeTime:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        for _ in range(5):  # let the requests that have been sent get on their way
            await asyncio.sleep(0)


Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(respond: Respond, time: FakeTime) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/v1/completions", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    endpoint = Endpoint(url=f"http://127.0.0.1:{port}", model="m", extra={"flavour": 1})
    async with aiohttp.ClientSession() as session:
        yield Client(endpoint, session, time, time.sleep)
    await runner.cleanup()


async def stream(request: web.Request, *events: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + event + b"\n\n")
    await response.write_eof()
    return response


WHOLE = (chunk(text="a", token_ids=[1]), chunk(text="b", token_ids=[2], finish_reason="length"), b"[DONE]")


async def test_requests_leave_when_they_are_due_though_none_was_answered() -> None:
    time, seen, release = FakeTime(), [], asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        if len(seen) == 3:
            release.set()  # nobody is answered before all have been sent
        await release.wait()
        return await stream(request, *WHOLE)

    async with served(respond, time) as client, asyncio.timeout(20):
        records = await client.run(workload(ask("a", 0.0), ask("c", 5.0), ask("b", 2.0)))
    assert [record.name for record in records] == ["a", "c", "b"]
    assert [record.error for record in records] == ["", "", ""]
    assert time.slept == [2.0, 3.0]
    assert [record.due_s for record in records] == [0.0, 5.0, 2.0]
    assert [record.tokens for record in records] == [(1, 2)] * 3


async def test_a_body_asks_for_exact_greedy_answers() -> None:
    time, seen = FakeTime(), []

    async def respond(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, *WHOLE)

    async with served(respond, time) as client:
        await client.run(workload(ask("a")))
    (body,) = seen
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (2, 0, True, True)
    assert (body["model"], body["flavour"]) == ("m", 1)


async def test_a_sequence_waits_for_each_answer() -> None:
    time, num_open, most_open = FakeTime(), 0, 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        response = await stream(request, *WHOLE)
        num_open -= 1
        return response

    async with served(respond, time) as client:
        records = await client.run(workload(ask("a"), ask("b"), ask("c"), is_sequential=True))
    assert most_open == 1
    assert time.slept == []
    assert all(record.lateness_s == 0.0 for record in records)


async def test_a_client_that_falls_behind_says_so_and_counts_it_into_ttft() -> None:
    class Slow(FakeTime):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds + 1.5)

    async def respond(request: web.Request) -> web.StreamResponse:
        return await stream(request, *WHOLE)

    async with served(respond, time := Slow()) as client:
        (record,) = await client.run(workload(ask("a", 4.0)))
    assert time.slept == [5.5]
    assert record.lateness_s == 1.5
    assert record.ttft_s >= 1.5


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (WHOLE[:1], "the stream ended early"),
        ((WHOLE[0], b"[DONE]"), "1 of 2 tokens"),
        ((b'{"error": {"message": "no room"}}',), "no room"),
        ((b"not json",), "Decode"),
    ],
)
async def test_a_broken_answer_is_an_error_in_its_record(events: tuple[bytes, ...], message: str) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events)

    async with served(respond, FakeTime()) as client:
        (record,) = await client.run(workload(ask("a")))
    assert message in record.error


async def test_a_refusal_is_an_error_in_its_record() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, text="slow down")

    async with served(respond, FakeTime()) as client:
        (record,) = await client.run(workload(ask("a")))
    assert record.error == "Refused: 429: slow down"


async def test_a_server_that_is_not_there_is_an_error_in_its_record() -> None:
    time = FakeTime()
    async with aiohttp.ClientSession() as session:
        client = Client(Endpoint(url="http://127.0.0.1:9", model="m"), session, time, time.sleep)
        (record,) = await client.run(workload(ask("a")))
    assert "Connect" in record.error
