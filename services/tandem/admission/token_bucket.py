"""Compute levels of a token bucket in whole numbers; the caller keeps the state and passes the time.

A bucket holds a minute's worth and fills evenly. Its level is counted in units of 1/60,000: then a limit of L per
minute adds exactly L units per millisecond, without fractions or rounding drift. A level may be negative: a debt, which
must be refilled first. `stores/lua/quota.lua` computes the same in Redis, whose numbers are exact up to 2^53, which
`MAX_LIMIT` keeps far away.
"""

from __future__ import annotations

UNIT = 60_000
"""Units of a level that one request or one token takes."""
MAX_LIMIT = 10**9
"""Largest limit per minute."""


def capacity(limit: int) -> int:
    """Return the level of a full bucket, in units, for a `limit` per minute."""
    return limit * UNIT


def refill(level: int, limit: int, elapsed_ms: int) -> int:
    """Return the level, in units, of a bucket that had `level` units before it was refilled for `elapsed_ms`
    milliseconds.

    `limit`: the bucket's limit per minute, which determines how fast it fills; the result is at most the level of a
    full bucket.
    """
    return min(capacity(limit), level + limit * elapsed_ms)


def wait_ms(level: int, limit: int, needed: int) -> int:
    """Return the milliseconds until a bucket at `level` units reaches `needed` units; 0 when it already has.

    `limit`: the bucket's limit per minute. `needed` must not exceed the capacity.
    """
    return max(0, -((level - needed) // limit))
