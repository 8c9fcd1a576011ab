"""Send the output of one request over one HTTP exchange, as server-sent events or as one body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from tandem.gateway.context.request_context import TIMING_HEADER
from tandem.gateway.http.exchange import Exchange, error_body, header_value, json_response
from tandem.gateway.http.openai_response import ResponseFormatter
from tandem.gateway.http.tandem_facts import server_timing, tandem_facts
from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import ScoredPrompt

_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Makes nginx and compatible proxies pass events on without buffering.
    "x-accel-buffering": "no",
}
_FULL_BYTES = 16 << 10
"""Number of held bytes from which on events are written without waiting for more."""


class EventStream:
    """Write one response of type text/event-stream to `exchange`: call `open` or `heartbeat` first, then `send` and
    `heartbeat` any number of times, then `close`.

    An error after the first byte is written as one event and ends the stream without `[DONE]`."""

    __slots__ = ("_exchange", "_held")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._held = bytearray()

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head of the response, with status 200, the headers of an event stream, and `headers`."""
        self._exchange.late_error = lambda error: bytes(self._held + _frame(error_body(error)))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in {**_EVENT_HEADERS, **headers}.items()]
        await self._exchange.send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def heartbeat(self, headers: Mapping[str, str]) -> None:
        """Send a comment, which clients skip, so that no proxy closes the connection as dead. Opens the stream with
        `headers` first where it is not open yet."""
        if not self._exchange.started:
            await self.open(headers)
        await self._write(b": heartbeat\n\n", more=True)

    async def send(self, *events: bytes, more_follow: bool = False) -> None:
        """Send events, each of them one line of JSON.

        `more_follow`: the caller will send further events without waiting. The given events are then held and written
        together with the next ones, or once 16 KiB are held, because a write is half of the cost of a token.
        """
        for event in events:
            self._held += _frame(event)
        if self._held and (not more_follow or len(self._held) >= _FULL_BYTES):
            await self._write(self._take_held(), more=True)

    async def close(self, *events: bytes) -> None:
        """Send all held events, `events` and `[DONE]`, which marks a complete stream, and end the response."""
        last = b"".join(map(_frame, (*events, b"[DONE]")))
        await self._write(self._take_held() + last, more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._exchange.send({"type": "http.response.body", "body": body, "more_body": more})

    def _take_held(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event


async def send_completion(
    exchange: Exchange, answer: CompletionStream, formatter: ResponseFormatter[Any], heartbeat_s: float
) -> None:
    """Send the whole response of the completion `answer`, streamed or as one body as the client requested, and return
    when it was sent.

    A stream begins with its first part, or with a heartbeat where that part takes longer than `heartbeat_s` seconds.
    Raises the error that ends the output, which the application then sends: with its HTTP status if nothing was sent
    before, else as the last event."""
    async with aclosing(answer.parts()) as parts:
        if answer.params.body.stream:
            await _stream(exchange, formatter, answer, parts, heartbeat_s)
        else:
            await _collect(exchange, formatter, answer, parts)


async def _stream(
    exchange: Exchange,
    formatter: ResponseFormatter[Any],
    answer: CompletionStream,
    parts: AsyncGenerator[Part, None],
    heartbeat_s: float,
) -> None:
    sse = EventStream(exchange)
    part = await _first(sse, answer, parts, heartbeat_s)
    if not exchange.started:
        await sse.open(_headers(answer))
    opened: set[int] = set()
    num_open = answer.num_choices
    while True:
        events: list[bytes] = []
        if not isinstance(part, ScoredPrompt) and part.choice not in opened:
            opened.add(part.choice)
            events = formatter.opening(part.choice)
        if isinstance(part, ChoiceEnd):
            num_open -= 1
            events += formatter.closing(part, None if num_open else tandem_facts(answer, answer.timing))
        elif not isinstance(part, ScoredPrompt):
            events += formatter.chunk(part)
        if not num_open:
            await sse.close(*events)
            return
        await sse.send(*events, more_follow=answer.has_more)
        part = await anext(parts)


async def _first(
    sse: EventStream, answer: CompletionStream, parts: AsyncGenerator[Part, None], heartbeat_s: float
) -> Part:
    """Wait for the first part and send heartbeats meanwhile. A stream that a heartbeat opened has no path header, as
    the path is not known yet; the last chunk contains the path too."""
    first_part = asyncio.ensure_future(anext(parts))
    try:
        while not (await asyncio.wait({first_part}, timeout=heartbeat_s))[0]:
            await sse.heartbeat(answer.rate_limits)
    finally:
        # A generator cannot be closed while it runs.
        if not first_part.done():
            first_part.cancel()
            await asyncio.wait({first_part})
    return first_part.result()


async def _collect(
    exchange: Exchange, formatter: ResponseFormatter[Any], answer: CompletionStream, parts: AsyncGenerator[Part, None]
) -> None:
    gathered = [part async for part in parts]
    headers = _headers(answer)
    timing = answer.timing
    if timing is not None:
        headers[TIMING_HEADER] = server_timing(timing)
    response = json_response(formatter.body(gathered, tandem_facts(answer, timing)), headers=headers)
    await response(exchange.scope, exchange.receive, exchange.send)


def _headers(answer: CompletionStream) -> dict[str, str]:
    return {**answer.rate_limits, "x-tandem-path": header_value(answer.path)}
