"""Generate random numbers as functions of names; there is no state, so the order of calls does not change a number.

The first name is the seed of the whole workload; the others identify the number.
"""

from __future__ import annotations

import hashlib
import math
from array import array

Name = int | str

LOWEST_TOKEN = 1_000
"""Lowest generated token id. Below are special tokens and single bytes, whose text is often invalid UTF-8."""
HIGHEST_TOKEN = 32_000
"""Generated token ids are below this number. Every served model has at least so many tokens."""
_TOKENS = tuple(range(LOWEST_TOKEN, HIGHEST_TOKEN))
_TOKEN_OF_WORD = tuple(_TOKENS[word * len(_TOKENS) >> 16] for word in range(1 << 16))
"""A token for each 16-bit word. All prompts share these objects, so that a token costs a prompt 8 bytes, not 36."""


def uniform(*names: Name) -> float:
    """Return a pseudo-random number, uniformly distributed in [0, 1); equal `names` give the same number.

    `names`: seed of the workload, followed by names that identify the number."""
    return (int.from_bytes(hashlib.blake2b(_joined(names), digest_size=8).digest(), "little") >> 11) * 2.0**-53


def integer(low: int, high: int, *names: Name) -> int:
    """Return a pseudo-random integer, uniformly distributed in [low, high]; equal `names` give the same integer.

    `names`: see `uniform`."""
    return low + int(uniform(*names) * (high - low + 1))


def exponential(mean: float, *names: Name) -> float:
    return -mean * math.log1p(-uniform(*names))


def tokens(count: int, *names: Name) -> tuple[int, ...]:
    """Return `count` pseudo-random token ids, nearly uniformly distributed in [LOWEST_TOKEN, HIGHEST_TOKEN).

    `names`: see `uniform`. Equal `names` give the same ids; with a smaller `count`, a prefix of them."""
    words = array("H", hashlib.shake_128(_joined(names)).digest(2 * count))
    return tuple([_TOKEN_OF_WORD[word] for word in words])


def _joined(names: tuple[Name, ...]) -> bytes:
    return "\x1f".join(map(str, names)).encode()
