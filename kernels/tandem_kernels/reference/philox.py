"""Compute counter-based random numbers: pure functions of their coordinates, without generator state."""

from __future__ import annotations

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Return the four random 32-bit words of Philox4x32-10 for `counter` under `key` (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, index: int) -> float:
    """Return a random number in [0, 1) with 53 bits, which depends on the arguments only.

    `seed`: unsigned 64-bit number of the request. `choice`: index of the request's choice. `index`: number of the
    output token in that choice.
    """
    counter = (index & _MASK32, index >> 32, choice & _MASK32, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53
