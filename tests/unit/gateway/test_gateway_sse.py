"""Test the frames of an event stream and how they are grouped into writes."""

from __future__ import annotations

from typing import Any

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.http.exchange import EventStream, Exchange


async def opened() -> tuple[list[bytes], Exchange, EventStream]:
    """Return the list to which each write is added, and an exchange with its open stream."""
    writes: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            writes.append(message["body"])

    exchange = Exchange({"type": "http", "headers": []}, None, send)  # type: ignore[arg-type]
    stream = EventStream(exchange)
    await stream.open({})
    return writes, exchange, stream


async def test_simultaneous_events_are_sent_in_one_write() -> None:
    writes, _, stream = await opened()
    await stream.send(b"1", more_follow=True)
    await stream.send(more_follow=True)
    await stream.send(b"2", b"3", more_follow=True)
    assert writes == []
    await stream.send()
    assert writes == [b"data: 1\n\ndata: 2\n\ndata: 3\n\n"]
    await stream.send()
    await stream.send(b"4", more_follow=True)
    await stream.close(b"5")
    assert writes[1:] == [b"data: 4\n\ndata: 5\n\ndata: [DONE]\n\n"]


async def test_at_most_one_buffer_is_held_back() -> None:
    writes, _, stream = await opened()
    for _ in range(100):
        await stream.send(b"x" * 1000, more_follow=True)
    assert max(map(len, writes)) < 20_000 and sum(map(len, writes)) > 80_000


async def test_an_error_is_sent_after_held_back_events() -> None:
    _, exchange, stream = await opened()
    await stream.send(b"1", more_follow=True)
    assert exchange.late_error is not None
    late = exchange.late_error(TandemError(ErrorKind.WORKER_LOST, "gone"))
    assert late.startswith(b'data: 1\n\ndata: {"error":') and b"[DONE]" not in late
