"""Test that quota arithmetic in Python and its Lua in Redis agree, call by call over random sequences."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.admission.quota import MAX_BACK_MS, MAX_SWEEP, UNIT, Levels, QuotaLimits, Reservation, TenantQuota, capacity
from tandem.core.ids import TenantId
from tandem.stores.quota_store import RedisQuotas
from tests.effort import effort

TTL_MS = 20_000
_numbers = itertools.count()

Step = tuple[str, ...] | tuple[object, ...]
NAMES = st.sampled_from(["a", "b", "c", "gateway-1/17", "é"])
AMOUNTS = st.one_of(st.integers(0, 40), st.integers(0, 10**9))
JUMPS_MS = [-(10**7), -MAX_BACK_MS - 1, -MAX_BACK_MS, -5000, 1, 7, 999, 5000, TTL_MS - 1, TTL_MS, 10**7]
LIMITS = st.builds(
    QuotaLimits,
    st.sampled_from([0, 1, 7, 60, 10**9]),
    st.sampled_from([0, 1, 59, 1000, 10**9]),
    st.sampled_from([0, 0, 1, 2]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), NAMES, st.integers(0, 3), AMOUNTS, st.booleans()),
        st.tuples(st.just("renew"), st.dictionaries(NAMES, AMOUNTS, max_size=4)),
        st.tuples(st.just("settle"), NAMES, st.one_of(st.none(), AMOUNTS)),
        st.tuples(st.just("clock"), st.sampled_from(JUMPS_MS)),
        st.tuples(st.just("limits"), LIMITS),
    ),
    max_size=40,
)


# Only a reservation that is cut to its time to live makes room for the last of them.
AHEAD_AND_BACK: list[tuple[object, ...]] = [
    ("clock", 10**7),
    ("reserve", "a", 1, 900, False),
    ("clock", -(10**7)),
    ("reserve", "b", 1, 100, False),
    ("clock", TTL_MS - 1),
    ("reserve", "b", 1, 100, False),
    ("clock", 1),
    ("reserve", "b", 1, 100, False),
]


async def compare(url: str, limits: QuotaLimits, steps: list[tuple[object, ...]]) -> None:
    now = 1_795_000_000_000
    book, tenant = TenantQuota(), TenantId(f"t{next(_numbers)}")
    quotas = RedisQuotas(url, "agree", ttl_s=TTL_MS / 1000, answer_s=30.0, now_ms=lambda: now)
    try:
        for step in steps:
            match step:
                case ("reserve", str(name), int(requests), int(tokens), bool(force)):
                    reservation = Reservation(name, requests, tokens, force)
                    assert await quotas.reserve(tenant, limits, reservation) == book.reserve(
                        reservation, limits, now, TTL_MS
                    ), step
                case ("renew", dict(used)):
                    gone = await quotas.renew(tenant, limits, used)
                    assert gone == set(book.renew(used, limits, now, TTL_MS)), step
                case ("settle", str(name), used):
                    assert used is None or isinstance(used, int)
                    answer = await quotas.settle(tenant, limits, name, used)
                    assert bool(answer[2]) == book.settle(name, used, limits, now, TTL_MS), step
                case ("clock", int(ms)):
                    now += ms
                case ("limits", QuotaLimits() as limits):
                    pass
            levels = (await quotas.settle(tenant, limits, "nobody", 0))[:2]
            book.settle("nobody", 0, limits, now, TTL_MS)
            assert Levels(*levels) == Levels(*(level or 0 for level in book.levels)), step
            book.check()
    finally:
        await quotas.close()


@pytest.mark.redis
@effort(80)
@given(LIMITS, STEPS)
@example(
    QuotaLimits(60, 1000, 2), [("reserve", "a", 1, 1000, False), ("renew", {"a": 5000}), ("reserve", "b", 1, 1, False)]
)
@example(
    QuotaLimits(0, 1000, 0), [("reserve", "a", 1, 900, False), ("renew", {"a": 10}), ("clock", TTL_MS), ("renew", {})]
)
@example(QuotaLimits(0, 1000, 1), AHEAD_AND_BACK)
@example(
    QuotaLimits(7, 59, 0), [("reserve", "a", 1, 59, False), ("clock", -MAX_BACK_MS), ("clock", -1), ("clock", 999)]
)
def test_python_and_lua_agree(redis_url: str, limits: QuotaLimits, steps: list[tuple[object, ...]]) -> None:
    asyncio.run(compare(redis_url, limits, steps))


@pytest.mark.redis
def test_they_agree_on_more_late_ones_than_one_call_settles(redis_url: str) -> None:
    many: list[tuple[object, ...]] = [("reserve", f"r{i:04}", 1, 1, False) for i in range(MAX_SWEEP + 40)]
    looks: list[tuple[object, ...]] = [("clock", TTL_MS), *[("reserve", f"x{i}", 1, 1, False) for i in range(3)]]
    asyncio.run(compare(redis_url, QuotaLimits(10**6, 10**6, MAX_SWEEP + 40), many + looks))


@effort(100)
@given(LIMITS, STEPS)
def test_what_is_taken_is_never_more_than_a_bucket_and_what_time_brings(
    limits: QuotaLimits, steps: list[tuple[object, ...]]
) -> None:
    """Whatever is refunded: a bucket is what was full, plus what time brought, less all that was taken, less what did
    not fit. So grants in any time are bounded by a bucket and the time's refill. A clock that goes back gives nothing;
    what it then goes on by counts as any time does."""
    book, now, taken, gone_on = TenantQuota(), 10**9, 0, 0
    for step in steps:
        match step:
            case ("reserve", str(name), int(_), int(tokens), bool(_)):
                is_new = name not in book.open
                verdict = book.reserve(Reservation(name, 1, tokens), limits, now, 10**12)
                taken += tokens if is_new and not verdict.refused else 0
            case ("clock", int(ms)):
                now, gone_on = now + ms, gone_on + max(0, ms)
            case _:
                continue
        book.check()
        if limits.tokens_per_minute:
            brought = limits.tokens_per_minute * gone_on
            assert taken * UNIT <= capacity(limits.tokens_per_minute) + brought
