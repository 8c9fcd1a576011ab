"""Encode the short hash and memory tier of a cached block as one 64-bit word, for the prefix index.

A word is the first 62 bits of the block's hash (the short hash) above two bits of tier. An index of words takes half of
the memory that whole hashes would take, and a list of words is one array, which is read without a Python step for each
word. In a cluster with a million blocks, the probability that two of them have the same short hash is one in ten
million. If it happens, a router expects a hit that the worker, which compares whole hashes, does not find. The index
gives hints, and a wrong hint costs time but does not change an answer.
"""

from __future__ import annotations

import struct

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored, KVFact
from tandem.core.ids import BlockHash

GONE, HOST, DEVICE = 0, 1, 2
"""Tiers: not held any more; held in host memory only; held in device memory."""
TIER_BITS = 2
TIER_MASK = (1 << TIER_BITS) - 1
WORD_BYTES = 8
_NAME_MASK = (1 << 64) - 1 - TIER_MASK
_first_word = struct.Struct("<Q").unpack_from


def short_hash(block: BlockHash) -> int:
    """Return the first 62 bits of a block's hash, shifted above two zero bits: the block's word in tier GONE."""
    return _first_word(block)[0] & _NAME_MASK  # type: ignore[no-any-return]


def encode_event(fact: KVFact) -> int:
    """Return the event as one 64-bit word: the short hash of its block and the memory tier in which the block is after
    the event."""
    match fact:
        case BlockStored():
            return short_hash(fact.hash) | DEVICE
        case BlockOffloaded():
            return short_hash(fact.hash) | HOST
        case BlockEvicted():
            return short_hash(fact.hash)
