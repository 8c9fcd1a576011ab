"""Test that a prompt's block hashes do not depend on slicing, and that long prompts do not block the event loop."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tandem.gateway.prefix.prefix_index_client import SLICE_TOKENS, hash_prompt_blocks
from tandem.kv.hashing import chain_hashes, root_hash


def request_of(num_tokens: int, salt: str = "") -> Request:
    tokens = tuple(i * 31 % 997 for i in range(num_tokens))
    sampling = SamplingParams(max_tokens=1)
    return Request(id=RequestId("r"), model="m", prompt_tokens=tokens, sampling=sampling, cache_salt=salt)


@pytest.mark.parametrize("block_size", [8, 256])
@pytest.mark.parametrize("more", [-1, 0, 1, 300, SLICE_TOKENS, 2 * SLICE_TOKENS + 7])
async def test_hashing_in_slices_changes_no_block_hash(more: int, block_size: int) -> None:
    request = request_of(SLICE_TOKENS + more, "salt")
    names = await hash_prompt_blocks(request, "f", block_size)
    root = root_hash("f", block_size, "salt")
    assert list(names) == chain_hashes(root, request.prompt_tokens, block_size)
    assert (
        request.block_names == {(root, block_size): names}
        and await hash_prompt_blocks(request, "f", block_size) is names
    )


async def test_a_prompt_shorter_than_a_block_has_no_hashes() -> None:
    assert await hash_prompt_blocks(request_of(7), "f", 8) == ()


async def test_other_tasks_run_between_slices() -> None:
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count())
    await hash_prompt_blocks(request_of(8 * SLICE_TOKENS), "f", 16)
    counting.cancel()
    assert num_turns >= 7
