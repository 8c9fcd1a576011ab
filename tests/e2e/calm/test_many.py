"""Test many requests of all kinds at once: each ends as expected, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx

from tests.e2e.gateway.http import completion
from tests.e2e.gateway.pair import Pair

NUM_REQUESTS = 64
LENGTHS = (1, 15, 16, 40, 200, 900)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "seed": 2},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01, "seed": 3},
)


def body(number: int) -> dict[str, Any]:
    options = SAMPLING[number % len(SAMPLING)] | {"stream": number % 2 == 0}
    return completion(LENGTHS[number % len(LENGTHS)], 700 + number, 4 + number % 40, **options)


async def run(http: httpx.AsyncClient, number: int) -> str:
    """Send a request; every fifth client disconnects, in the middle of its stream or before it."""
    request_body = body(number)
    if number % 5 == 0:
        request_body |= {"max_tokens": 3000}
    try:
        async with asyncio.timeout(0.05 * (number % 4) if number % 5 == 0 else 60):
            async with http.stream("POST", "/v1/completions", json=request_body) as answer:
                assert answer.status_code == 200, await answer.aread()
                assert answer.headers["x-tandem-path"] == "remote"
                text = (await answer.aread()).decode()
    except TimeoutError:
        return "hung up"
    if request_body["stream"]:
        assert text.rstrip().endswith("data: [DONE]") and "error" not in text
        assert text.count('"finish_reason":"length"') == 1, text
    return "served"


async def test_each_of_64_ends_as_it_should(calm: Pair) -> None:
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=calm.gateway.url, trust_env=False, timeout=60, limits=limits) as http:
        ends = Counter(await asyncio.gather(*(run(http, number) for number in range(NUM_REQUESTS))))
    num_leaving = len(range(0, NUM_REQUESTS, 5))
    assert ends == {"served": NUM_REQUESTS - num_leaving, "hung up": num_leaving}
    await asyncio.to_thread(calm.wait_idle)
    assert calm.cluster.complaints() == []
