"""An endpoint in this process that does what a test tells it, and a time that moves only when somebody sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from loadtest.client.endpoint import Endpoint

Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeTime:
    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        for _ in range(5):  # what has begun gets on its way before time goes on
            await asyncio.sleep(0)
        self.time += seconds


@asynccontextmanager
async def serving(respond: Respond) -> AsyncIterator[Endpoint]:
    async with running({"/v1/completions": respond}) as url:
        yield Endpoint(url=url, model="m", extra={"flavour": 1})


@asynccontextmanager
async def running(posts: Mapping[str, Respond]) -> AsyncIterator[str]:
    """Yield the URL of a server of model `m` with a function for each path of POST."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 23)
    app.add_routes([web.post(path, respond) for path, respond in posts.items()])
    app.add_routes([web.get("/v1/models", models), web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def chunk(**choice: object) -> bytes:
    return msgspec.json.encode({"choices": [choice]})


WHOLE = (chunk(text="a", token_ids=[1]), chunk(text="b", token_ids=[2], finish_reason="length"), b"[DONE]")
"""An answer of two tokens."""


async def stream(request: web.Request, *events: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + event + b"\n\n")
    await response.write_eof()
    return response


def streaming(*events: bytes) -> Respond:
    async def respond(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events)

    return respond


answer_whole = streaming(*WHOLE)


class SlowAnswers:
    """Its `respond` answers whole, each time `seconds` later; `most_open` is how many requests were open at once."""

    def __init__(self, time: FakeTime, seconds: float) -> None:
        self.most_open = 0
        self._num_open = 0
        self._time = time
        self._seconds = seconds

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        self._time.time += self._seconds
        response = await answer_whole(request)
        self._num_open -= 1
        return response
