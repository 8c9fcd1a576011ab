"""Test the queue of one request's events."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.events import SampledToken, Token
from tandem.core.ids import HandoffId, JobKey, RequestId
from tandem.core.request import Request, SamplingParams
from tandem.gateway.orchestration.active_request import ActiveRequest, EventQueue
from tandem.orchestration.director import OpenRequest
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.orchestration.request_state import RequestState

KEY = JobKey(RequestId("r"), 1)


def token(index: int) -> Token:
    return Token(KEY, index, SampledToken(index))


async def test_events_arrive_in_order_whether_reader_or_writer_is_first() -> None:
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


async def test_events_of_a_finished_choice_are_dropped() -> None:
    """An event that was held back for the finished choice would otherwise stay in the queue for ever."""
    sampling = SamplingParams(max_tokens=4)
    request = Request(id=KEY.request, model="m", prompt_tokens=(1,), sampling=sampling, num_choices=2)
    open_request = OpenRequest(RequestState(request, HandoffId("h")), PhaseLedger(0.0), 0.0)
    active = ActiveRequest(open_request, lambda request: None, lambda request, choice: None)
    assert not active.has_more
    active.push(Token(KEY._replace(choice=1), 0, SampledToken(5)))
    assert active.has_more
    active.finish(1)
    assert not active.has_more
    active.push(token(0))
    assert active.has_more
    assert await anext(aiter(active)) == token(0)
