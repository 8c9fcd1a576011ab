"""The arithmetic of a token bucket on whole numbers; keeps no state and never reads a clock.

A bucket holds what a minute brings and fills up evenly. Its level is counted in units of 1/60,000: then a limit of L
per minute brings exactly L units per millisecond, and neither fractions nor a drift between two ways of adding them
up exist. A level may be negative: a debt, which must be filled up first. `stores/lua/quota.lua` says the same for
Redis, whose numbers are exact up to 2^53, which `MAX_LIMIT` keeps far away.
"""

from __future__ import annotations

UNIT = 60_000
"""Of a level: what one request or one token takes."""
MAX_LIMIT = 10**9
"""Per minute."""


def capacity(limit: int) -> int:
    """The level of a whole bucket, in units."""
    return limit * UNIT


def refill(level: int, limit: int, elapsed_ms: int) -> int:
    """The level after some time."""
    return min(capacity(limit), level + limit * elapsed_ms)


def wait_ms(level: int, limit: int, needed: int) -> int:
    """Milliseconds until the level is `needed` units, at most a whole bucket; 0 when it is."""
    return max(0, -((level - needed) // limit))
