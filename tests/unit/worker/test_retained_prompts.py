"""Test over real gRPC that a worker keeps the prompt of a request that wants it while it evicts those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.events import Finished
from tandem.core.request import Request
from tests.e2e.client import PATIENCE_S, new_request
from tests.unit.worker.conftest import Node, Nodes
from tests.unit.worker.fake_model import MODEL

NUM_BLOCKS = 32
PROMPT = list(range(1, 26))
"""Six full blocks of four tokens; at most eight of 32 may be retained."""


async def num_cached(node: Node, request: Request) -> int:
    end = await node.client.end_of(await node.client.generate(request))
    assert isinstance(end, Finished)
    return end.num_cached_tokens


def others(first: int) -> list[Sequence[int]]:
    """Return prompts that together fill the pool twice."""
    return [[first + number, *range(60, 99)] for number in range(6)]


@pytest.mark.parametrize(("retain_s", "max_tokens", "expected"), [(0.0, 0, 0), (60.0, 0, 24), (60.0, 8, 8)])
async def test_a_retained_prompt_outlives_others(nodes: Nodes, retain_s: float, max_tokens: int, expected: int) -> None:
    node = await nodes.start(num_blocks=NUM_BLOCKS)
    kept = replace(new_request(MODEL, PROMPT, 1), retain_s=retain_s, max_retained_tokens=max_tokens)
    assert await num_cached(node, kept) == 0
    for prompt in others(30):
        await num_cached(node, new_request(MODEL, prompt, 1))
    assert await num_cached(node, new_request(MODEL, PROMPT, 1)) == expected
    books = await node.client.books()
    assert books.num_free_blocks == NUM_BLOCKS and books.num_retained_blocks == expected // 4


async def test_a_prompt_is_kept_no_longer_than_its_time(nodes: Nodes) -> None:
    node = await nodes.start(num_blocks=NUM_BLOCKS)
    await num_cached(node, replace(new_request(MODEL, PROMPT, 1), retain_s=0.01))
    async with asyncio.timeout(PATIENCE_S):
        while (await node.client.books()).num_retained_blocks:
            await asyncio.sleep(0.01)
    for prompt in others(30):
        await num_cached(node, new_request(MODEL, prompt, 1))
    assert await num_cached(node, new_request(MODEL, PROMPT, 1)) == 0
