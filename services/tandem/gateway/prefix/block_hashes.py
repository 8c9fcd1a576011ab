"""Names the blocks of a prompt without holding up the event loop; never looks them up.

Hashing takes some 60 ns per token, and all of it under the interpreter's lock, since a block is too short for
`hashlib` to let go of it: a thread holds up the event loop as long as hashing at once does (`python -m loadtest
index`). So a long prompt is hashed in slices on the event loop, each from the last name of the one before, and between
two of them everything else has its turn.
"""

from __future__ import annotations

import asyncio

from tandem.core.ids import BlockHash
from tandem.core.request import Request
from tandem.kv.hashing import chain_hashes, prompt_hashes, root_hash

SLICE_TOKENS = 4096
"""Hashed in one turn of the event loop, a multiple of every block size: 0.4 ms. Slices of 1024 hold it up for
0.2 and take a tenth longer."""


async def hash_prompt_blocks(request: Request, model_fingerprint: str, block_size: int) -> tuple[BlockHash, ...]:
    """Hashes of the prompt's full blocks, which the request remembers."""
    root = root_hash(model_fingerprint, block_size, request.cache_salt)
    tokens = request.prompt_tokens
    if len(tokens) <= SLICE_TOKENS or (root, block_size) in request.block_names:
        return prompt_hashes(root, request, block_size)
    names: list[BlockHash] = []
    parent = root
    for start in range(0, len(tokens), SLICE_TOKENS):
        names += chain_hashes(parent, tokens[start : start + SLICE_TOKENS], block_size)
        parent = names[-1]
        await asyncio.sleep(0)
    request.block_names[root, block_size] = tuple(names)
    return request.block_names[root, block_size]
