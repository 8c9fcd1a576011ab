"""An endpoint in this process that does what a test tells it, and a time that moves only when somebody sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", respond)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield Endpoint(url=f"http://127.0.0.1:{runner.addresses[0][1]}", model="m", extra={"flavour": 1})
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


async def answer_whole(request: web.Request) -> web.StreamResponse:
    return await stream(request, *WHOLE)
