"""Requests leave when they are due, conversations go on, and what holds a loop back is counted."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from loadtest.client.calls import Caller, TimedCall
from loadtest.client.client import Client
from loadtest.client.endpoint import Endpoint
from loadtest.client.open_loop import MAX_OPEN, OpenLoop, run_workload, send_sequentially
from loadtest.client.records import Record
from loadtest.client.workloads import BenchRequest, Workload
from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tandem.workload.scheduled_request import Follow, ScheduledRequest
from tests.unit.loadtest.served import (
    WHOLE,
    FakeTime,
    Respond,
    SlowAnswers,
    answer_whole,
    chunk,
    serving,
    stream,
    streaming,
)


def call(name: str, due_s: float = 0.0) -> TimedCall:
    return TimedCall(name=name, group="g", num_prompt_tokens=3, num_requested_tokens=2, body=name.encode(), due_s=due_s)


class Ended:
    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.num_open: list[int] = []

    def __call__(self, record: Record, num_open: int) -> None:
        assert record.name not in self.records
        self.records[record.name] = record
        self.num_open.append(num_open)


@asynccontextmanager
async def looping(
    respond: Respond, time: FakeTime, ended: Ended, max_open: int = MAX_OPEN
) -> AsyncIterator[tuple[OpenLoop, Endpoint]]:
    async with serving(respond) as endpoint, aiohttp.ClientSession() as session, asyncio.timeout(20):
        yield OpenLoop(Client(endpoint, session, time), time, time.sleep, max_open, ended), endpoint


# ---- the schedule


async def test_a_stalled_server_shows_in_all_requests_that_were_due_meanwhile() -> None:
    """No coordinated omission: a client that waited for each answer would have seen one slow request."""
    time, ended, release, names = FakeTime(), Ended(), asyncio.Event(), "abcdef"
    num_seen = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        if num_seen == len(names):
            time.time = 200.0
            release.set()  # nobody is answered before all have been sent
        await release.wait()
        return await answer_whole(request)

    async with looping(respond, time, ended) as (loop, _):
        await loop.run(call(name, float(due)) for due, name in enumerate(names))
    assert time.slept == [1.0] * 5
    assert [ended.records[name].ttft_s for name in names] == [100.0, 99.0, 98.0, 97.0, 96.0, 95.0]
    assert [ended.records[name].lateness_s for name in names] == [0.0] * 6
    assert (loop.most_open, loop.num_sent, loop.num_open, loop.num_held) == (6, 6, 0, 0)
    assert sorted(ended.num_open) == [0, 1, 2, 3, 4, 5]


async def test_a_client_that_falls_behind_reports_it_and_counts_it_into_ttft() -> None:
    class Slow(FakeTime):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds + 1.5)

    async with looping(answer_whole, Slow(), ended := Ended()) as (loop, _):
        await loop.run([call("a", 4.0)])
    assert ended.records["a"].lateness_s == 1.5
    assert ended.records["a"].ttft_s >= 1.5


async def test_a_limit_of_open_requests_holds_back_and_is_counted() -> None:
    time, ended = FakeTime(), Ended()
    answers = SlowAnswers(time, 10.0)
    async with looping(answers.respond, time, ended, max_open=1) as (loop, _):
        await loop.run([call("a"), call("b"), call("c")])
    assert answers.most_open == loop.most_open == 1
    assert loop.num_held == 2
    assert loop.held_s == 20.0
    assert [ended.records[name].lateness_s for name in "abc"] == [0.0, 10.0, 20.0]


async def test_of_a_burst_the_first_leave_before_the_last_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.client.open_loop.BURST", 4)
    num_seen = num_seen_at_last = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        return await answer_whole(request)

    def calls() -> Iterator[TimedCall]:
        nonlocal num_seen_at_last
        for number in range(160):
            yield call(str(number))
        num_seen_at_last = num_seen

    async with looping(respond, FakeTime(), Ended()) as (loop, _):
        await loop.run(calls())
    assert num_seen_at_last > 0 and num_seen == 160


async def test_failures_end_nothing_but_themselves() -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        if await request.text() == "b":
            return web.Response(status=429)
        return await answer_whole(request)

    async with looping(respond, FakeTime(), ended := Ended()) as (loop, _):
        await loop.run([call("a"), call("b"), call("c")])
    assert {name: record.error_kind for name, record in ended.records.items()} == {"a": "", "b": "http 429", "c": ""}


# ---- memory


@pytest.mark.slow
async def test_of_a_long_workload_only_what_is_open_is_held() -> None:
    class Counted(bytes):
        num_alive = most_alive = 0

        def __del__(self) -> None:
            Counted.num_alive -= 1

    def calls() -> Iterator[TimedCall]:
        for number in range(100):
            body = Counted(b"x")
            Counted.num_alive += 1
            Counted.most_alive = max(Counted.most_alive, Counted.num_alive)
            yield TimedCall(name=str(number), group="g", num_prompt_tokens=1, num_requested_tokens=2, body=body)

    num_ended = 0

    def ended(_: Record, __: int) -> None:
        nonlocal num_ended
        num_ended += 1

    time = FakeTime()
    async with serving(answer_whole) as endpoint, aiohttp.ClientSession() as session, asyncio.timeout(60):
        await OpenLoop(Client(endpoint, session, time), time, time.sleep, 8, ended).run(calls())
    gc.collect()
    assert num_ended == 100
    assert Counted.most_alive <= 8 + 4  # those open, the one to come, and what the HTTP client has not let go yet
    assert Counted.num_alive <= 1


# ---- conversations


def scheduled_call(
    name: str, prompt: tuple[int, ...], due_s: float, follow: Follow | None = None, **extra: object
) -> ScheduledRequest:
    sampling = SamplingParams(max_tokens=2, seed=7)
    request = Request(id=RequestId(name), model="x", prompt_tokens=prompt, sampling=sampling, **extra)  # type: ignore[arg-type]
    return ScheduledRequest(request, "chat", due_s, "acme", follow)


def conversation(tokens: tuple[int, ...] = (5, 6)) -> ScheduledRequest:
    """Two turns; the second is due 3 s after the first one's end."""

    def follow(answer: object, ended_s: float) -> ScheduledRequest:
        return scheduled_call("r.2", (*tokens, *answer, 9), ended_s + 3.0)  # type: ignore[misc]

    return scheduled_call("r.1", tokens, 0.0, follow)


async def test_a_conversation_goes_on_with_what_was_answered() -> None:
    time, ended, bodies = FakeTime(), Ended(), []

    async def respond(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        time.time += 1.0
        return await answer_whole(request)

    async with looping(respond, time, ended) as (loop, endpoint):
        await loop.run(map(Caller(endpoint, {}).call, [conversation()]))
    assert [body["prompt"] for body in bodies] == [[5, 6], [5, 6, 1, 2, 9]]
    assert time.slept == [3.0]
    assert [(r.name, r.due_s, r.tenant, r.num_prompt_tokens) for r in ended.records.values()] == [
        ("r.1", 0.0, "acme", 2),
        ("r.2", 4.0, "acme", 5),
    ]


async def test_an_answer_without_ids_is_followed_by_as_many_other_tokens() -> None:
    time, bodies = FakeTime(), []
    usage = b'{"choices": [], "usage": {"completion_tokens": 2}}'

    async def respond(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await stream(request, chunk(text="a b"), usage, b"[DONE]")

    async with looping(respond, time, Ended()) as (loop, endpoint):
        await loop.run(map(Caller(endpoint, {}).call, [conversation()]))
    first, second = (body["prompt"] for body in bodies)
    assert (second[:2], len(second), second[-1]) == (first, 5, 9)


async def test_a_conversation_ends_with_its_first_failure() -> None:
    async with looping(streaming(*WHOLE[:1]), FakeTime(), ended := Ended()) as (loop, endpoint):
        await loop.run(map(Caller(endpoint, {}).call, [conversation()]))
    assert [record.error_kind for record in ended.records.values()] == ["cut off"]


@pytest.mark.parametrize(("with_priority", "priority"), [(False, None), (True, 2)])
async def test_tenants_have_keys_and_priorities_are_sent_where_enabled(
    with_priority: bool, priority: int | None
) -> None:
    seen = []

    async def respond(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers.get("authorization"), await request.json()))
        return await answer_whole(request)

    async with looping(respond, FakeTime(), Ended()) as (loop, endpoint):
        caller = Caller(endpoint, {"acme": "secret"}, with_priority=with_priority)
        await loop.run([caller.call(scheduled_call("a", (5,), 0.0, priority=2))])
    ((key, body),) = seen
    assert key == "Bearer secret"
    assert body.get("priority") == priority
    assert (body["seed"], body["temperature"], body["ignore_eos"]) == (7, 1.0, True)


# ---- workloads of a bench


def bench_request(name: str, due_s: float = 0.0) -> BenchRequest:
    return BenchRequest(name=name, group="g", prompt=(5, 6, 7), max_tokens=2, due_s=due_s)


async def test_a_bench_gets_its_records_in_the_order_of_its_requests() -> None:
    requests = (bench_request("a", 0.0), bench_request("c", 0.002), bench_request("b", 0.001))
    async with serving(answer_whole) as endpoint:
        records = await run_workload(endpoint, Workload(name="w", seed=0, turn=0, requests=requests), FakeTime())
    assert [record.name for record in records] == ["a", "c", "b"]
    assert [record.due_s for record in records] == [0.0, 0.002, 0.001]
    assert [record.tokens for record in records] == [(1, 2)] * 3


async def test_a_sequence_waits_for_each_answer() -> None:
    time, ended = FakeTime(), Ended()
    answers = SlowAnswers(time, 1.0)
    async with serving(answers.respond) as endpoint, aiohttp.ClientSession() as session:
        await send_sequentially(Client(endpoint, session, time), time, [call("a"), call("b"), call("c")], ended)
    assert answers.most_open == 1
    assert [record.due_s for record in ended.records.values()] == [0.0, 1.0, 2.0]
    assert all(record.lateness_s == 0.0 for record in ended.records.values())
