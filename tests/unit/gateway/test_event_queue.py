"""The queue of one request's events."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.events import SampledToken, Token
from tandem.core.ids import JobKey, RequestId
from tandem.gateway.event_queue import EventQueue

KEY = JobKey(RequestId("r"), 1)


def token(index: int) -> Token:
    return Token(KEY, index, SampledToken(index))


async def test_events_come_in_order_whoever_is_first() -> None:
    queue = EventQueue()
    queue.push(token(0))
    queue.push(token(1))
    assert len(queue) == 2 and list(queue) == [token(0), token(1)]
    assert [await queue.next(), await queue.next()] == [token(0), token(1)]
    reading = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    queue.push(token(2))
    queue.push(token(3))
    assert [await reading, await queue.next()] == [token(2), token(3)]
    assert len(queue) == 0


async def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    queue = EventQueue()
    reading = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    queue.push(token(0))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    queue.push(token(1))
    assert [await queue.next(), await queue.next()] == [token(0), token(1)]
