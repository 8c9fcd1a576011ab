"""A cached block's name and where it lies as one 64-bit word, as the prefix index writes, sends and keeps it; never
knows which worker it is about.

A word is the first 62 bits of the block's hash above two bits of tier. So an index costs half of what whole hashes
would, and a list of words is an array that is read without a look at each. Two blocks of a million share their 62 bits
once in ten million clusters, and then a router expects a hit that the worker, who compares whole hashes, does not
find: an index gives hints, and a wrong one costs time, never an answer.
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
    """The word of a block that is GONE: its name alone."""
    return _first_word(block)[0] & _NAME_MASK  # type: ignore[no-any-return]


def encode_event(fact: KVFact) -> int:
    """What becomes of a block, as a word."""
    match fact:
        case BlockStored():
            return short_hash(fact.hash) | DEVICE
        case BlockOffloaded():
            return short_hash(fact.hash) | HOST
        case BlockEvicted():
            return short_hash(fact.hash)
