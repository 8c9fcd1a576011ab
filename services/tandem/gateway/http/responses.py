"""Sends one answer over one exchange, as a stream or as one body; never knows what a part looks like to a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET

from tandem.gateway.context.rate_limit_status import standing_headers
from tandem.gateway.context.request_context import TIMING_HEADER
from tandem.gateway.http.exchange import Exchange, Header, header_value
from tandem.gateway.http.openai_response import ResponseFormatter
from tandem.gateway.http.openai_schema import TandemFacts
from tandem.gateway.http.server_timing import server_timing, timing_facts
from tandem.gateway.http.sse import EventStream
from tandem.gateway.output.text_stream import ChoiceEnd
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import ScoredPrompt
from tandem.gateway.telemetry.request_recorder import RequestTiming


async def send_completion(
    exchange: Exchange, answer: CompletionStream, form: ResponseFormatter, heartbeat_s: float
) -> None:
    """A stream begins with its first part, or with its first heartbeat where that takes longer than `heartbeat_s`.
    What fails until then gets its proper status."""
    async with aclosing(answer.parts()) as parts:
        if answer.params.stream:
            await _stream(exchange, form, answer, parts, heartbeat_s)
        else:
            await _collect(exchange, form, answer, parts)


async def _stream(
    exchange: Exchange,
    form: ResponseFormatter,
    answer: CompletionStream,
    parts: AsyncGenerator[Part, None],
    heartbeat_s: float,
) -> None:
    sse = EventStream(exchange)
    part = await _first(sse, answer, parts, heartbeat_s)
    if not exchange.started:
        await sse.open([*standing_headers(answer.standing), _path_header(answer)])
    opened: set[int] = set()
    num_open = answer.num_choices
    while True:
        events: list[bytes] = []
        if not isinstance(part, ScoredPrompt) and part.choice not in opened:
            opened.add(part.choice)
            events = form.opening(part.choice, answer.usage)
        if isinstance(part, ChoiceEnd):
            num_open -= 1
            events += form.closing(part, answer.usage, None if num_open else _facts(answer, answer.timing))
        elif not isinstance(part, ScoredPrompt):
            events += form.chunk(part, answer.usage)
        if not num_open:
            await sse.close(*events)
            return
        await sse.send(*events, more_follow=answer.has_more)
        part = await anext(parts)


async def _first(
    sse: EventStream, answer: CompletionStream, parts: AsyncGenerator[Part, None], heartbeat_s: float
) -> Part:
    """The path is not known yet when a heartbeat opens the stream; the last chunk tells it anyway."""
    coming = asyncio.ensure_future(anext(parts))
    try:
        while not (await asyncio.wait({coming}, timeout=heartbeat_s))[0]:
            await sse.heartbeat(standing_headers(answer.standing))
    finally:
        # A generator that still runs cannot be closed.
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
    return coming.result()


async def _collect(
    exchange: Exchange, form: ResponseFormatter, answer: CompletionStream, parts: AsyncGenerator[Part, None]
) -> None:
    gathered = [part async for part in parts]
    headers = [*standing_headers(answer.standing), _path_header(answer)]
    timing = answer.timing
    if timing is not None:
        headers.append((TIMING_HEADER.encode(), server_timing(timing)))
    await exchange.send_json(200, form.body(gathered, answer.usage(), _facts(answer, timing)), headers)


def _facts(answer: CompletionStream, timing: RequestTiming | None) -> TandemFacts:
    return TandemFacts(
        answer.path,
        answer.num_attempts,
        UNSET if answer.reasons is None else answer.reasons,
        UNSET if timing is None else timing_facts(timing),
    )


def _path_header(answer: CompletionStream) -> Header:
    return (b"x-tandem-path", header_value(answer.path))
