"""Test that workers which plan their next step while one runs produce the same tokens as workers that do not."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.events import Cancelled, Finished, Token
from tandem.core.request import Request
from tests.e2e.client import Client, hand_over, settled
from tests.e2e.worker.conftest import Start
from tests.e2e.worker.test_two_workers import fresh_request

_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 200, 3))},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "seed": 2**64 - 1},
)


def _requests() -> list[Request]:
    """Return requests with all kinds of sampling, and prompts of one step and of several."""
    plain_requests = [fresh_request(5 + 23 * i, 24) for i in range(2 * len(_SAMPLINGS))]
    return [
        replace(one, sampling=replace(one.sampling, **_SAMPLINGS[i % len(_SAMPLINGS)]))
        for i, one in enumerate(plain_requests)
    ]


async def _generated(client: Client, request: Request) -> list[Token]:
    key = await client.generate(request)
    assert isinstance(await client.end_of(key), Finished)
    return [event for event in client.events[key] if isinstance(event, Token)]


@pytest.mark.nightly
async def test_tokens_are_those_of_steps_one_by_one(start: Start) -> None:
    """Run requests at once on a worker with overlapping steps, others split between two workers, one of them
    cancelled.
    """
    deep = ("--plan-depth", "2")
    workers = start("plain", "mixed", "local"), *(start(name, "mixed", "local", *deep) for name in ("deep", "deeper"))
    async with AsyncExitStack() as stack:
        plain, one, two = [await stack.enter_async_context(Client(worker.ref)) for worker in workers]
        requests = _requests()
        right = {request.id: [event.token for event in await _generated(plain, request)] for request in requests}
        split, whole = requests[1::2], requests[::2]
        doomed = fresh_request(40, 3000)
        key = await one.generate(doomed)
        handed = [(request, (await hand_over(one, two, request))[0]) for request in split]
        await one.num_tokens(key, 5)
        outputs = await asyncio.gather(*(_generated(one, request) for request in whole))
        await one.cancel(key)
        assert await one.end_of(key) == Cancelled(key)
        for request, events in zip(whole, outputs, strict=True):
            assert [event.token for event in events] == right[request.id], request.sampling
        for request, name in handed:
            assert isinstance(await two.end_of(name), Finished)
            assert two.tokens(name) == [token.id for token in right[request.id]], request.sampling
        await settled(plain, one, two)
    for worker in workers:
        assert worker.stop() == 0 and worker.complaints() == []
