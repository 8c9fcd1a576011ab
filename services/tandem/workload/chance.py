"""Numbers drawn as functions of names; keeps no state, so that the order of draws never changes one.

The first name is the seed of the run, the others say what is drawn.
"""

from __future__ import annotations

import hashlib
import math
from array import array

Name = int | str


def uniform(*names: Name) -> float:
    """In [0, 1)."""
    return (int.from_bytes(hashlib.blake2b(_joined(names), digest_size=8).digest(), "little") >> 11) * 2.0**-53


def integer(low: int, high: int, *names: Name) -> int:
    """In [low, high]."""
    return low + int(uniform(*names) * (high - low + 1))


def exponential(mean: float, *names: Name) -> float:
    return -mean * math.log1p(-uniform(*names))


def tokens(count: int, *names: Name) -> tuple[int, ...]:
    """Ids below 65,536, whatever the vocabulary: nothing here looks one up."""
    return tuple(array("H", hashlib.shake_128(_joined(names)).digest(2 * count)))


def _joined(names: tuple[Name, ...]) -> bytes:
    return "\x1f".join(map(str, names)).encode()
