"""Compute hashes of KV blocks that are equal in every process for equal prefixes.

A block's hash chains over the hash of the block before it, so one hash identifies a whole prefix. The root holds
everything else that the KV depends on: model fingerprint, block size and the tenant's salt. Hashes are computed from
tokens; KV bytes are not read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from tandem.core.ids import BlockHash
from tandem.core.request import Request

HASH_BYTES = 16


def root_hash(model_fingerprint: str, block_size: int, salt: str) -> BlockHash:
    """Return the hash that serves as the parent of a prompt's first block.

    `model_fingerprint`: digest of what the KV depends on besides tokens. `block_size`: tokens of a block. `salt`: the
    tenant's salt; only prompts with the same salt share cached prefixes. The hash depends on all three, so prompts that
    differ in one of them share no hash.
    """
    parts = (model_fingerprint, str(block_size), salt)
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"tandem-kv-root")
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return BlockHash(digest.digest())


def chain_hashes(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return one hash for each full block of `block_size` tokens, in order; a partial last block has none. `parent` is
    the hash of the block before the first, or the `root_hash`."""
    hashes: list[BlockHash] = []
    words = array("I", tokens)
    size = block_size * words.itemsize
    view = memoryview(words).cast("B")
    for start in range(0, len(view) - size + 1, size):
        block = view[start : start + size]
        parent = BlockHash(hashlib.blake2b(block, key=parent, digest_size=HASH_BYTES).digest())
        hashes.append(parent)
    return hashes


def prompt_hashes(parent: BlockHash, request: Request, block_size: int) -> tuple[BlockHash, ...]:
    """Return the hashes of all full blocks of the request's prompt (`chain_hashes`).

    `parent`: the `root_hash` of the prompt. `block_size`: tokens of a block. The result is stored in the request, so a
    second call with the same arguments computes nothing.
    """
    hashes = request.block_names.get((parent, block_size))
    if hashes is None:
        hashes = request.block_names[parent, block_size] = tuple(
            chain_hashes(parent, request.prompt_tokens, block_size)
        )
    return hashes
