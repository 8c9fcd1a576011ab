"""Send the output of one request over one HTTP exchange, as server-sent events or as one body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tandem.gateway.context.request_context import TIMING_HEADER
from tandem.gateway.http.exchange import EventStream, Exchange, header_value
from tandem.gateway.http.openai_response import ResponseFormatter
from tandem.gateway.http.tandem_facts import server_timing, tandem_facts
from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import ScoredPrompt


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
    await exchange.send_json(formatter.body(gathered, tandem_facts(answer, timing)), headers)


def _headers(answer: CompletionStream) -> dict[str, str]:
    return {**answer.rate_limits, "x-tandem-path": header_value(answer.path)}
