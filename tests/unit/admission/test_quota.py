"""Test buckets and reservations, case by case; the property tests try them at random."""

from __future__ import annotations

import pytest

from tandem.admission.quota import (
    CONCURRENCY,
    MAX_BACK_MS,
    MAX_LIMIT,
    REQUESTS,
    TOKENS,
    UNIT,
    Levels,
    QuotaLimits,
    Reservation,
    TenantQuota,
    capacity,
    refill,
    wait_ms,
)
from tandem.admission.tenant_quota_state import FIRST_GUESS, TenantQuotaState, TokenUsage
from tandem.core.ids import TenantId

TTL = 20_000


def test_a_bucket_refills_in_a_minute_to_the_unit() -> None:
    level = 0
    for _ in range(60_000):
        level = refill(level, 7, 1)
    assert level == capacity(7) == refill(0, 7, 60_000) == refill(capacity(7), 7, 1)


@pytest.mark.parametrize("limit", [1, 7, 59, 60_001, MAX_LIMIT])
@pytest.mark.parametrize("level", [-(10**12), -1, 0, 1, 59_999])
def test_the_wait_ends_at_the_first_sufficient_millisecond(limit: int, level: int) -> None:
    needed = min(UNIT, capacity(limit))
    wait = wait_ms(level, limit, needed)
    assert level + limit * wait >= needed > level + limit * (wait - 1)


def test_a_refusal_takes_nothing_and_names_limit_and_wait() -> None:
    book, limits = TenantQuota(), QuotaLimits(60, 600, 1)
    assert book.reserve(Reservation("a", 1, 100), limits, 0, TTL).refused == ""
    levels = book.levels
    assert book.reserve(Reservation("b", 1, 1), limits, 0, TTL).refused == CONCURRENCY
    refusal = book.reserve(Reservation("b", 1, 501), limits, 0, TTL)
    assert (refusal.refused, refusal.wait_ms) == (TOKENS, 100)
    assert book.reserve(Reservation("b", 61, 501), limits, 0, TTL).refused == REQUESTS
    assert book.levels == levels and list(book.open) == ["a"]


def test_unused_tokens_are_returned_and_excess_use_is_owed() -> None:
    book, limits = TenantQuota(), QuotaLimits(0, 600, 0)
    book.reserve(Reservation("a", 1, 500), limits, 0, TTL)
    assert book.settle("a", 100, limits, 0, TTL) and book.levels == Levels(None, 500 * UNIT)
    book.reserve(Reservation("b", 1, 500), limits, 0, TTL)
    assert book.settle("b", 1100, limits, 0, TTL) and book.levels == Levels(None, -600 * UNIT)
    refusal = book.reserve(Reservation("c", 1, 1), limits, 0, TTL)
    assert (refusal.refused, refusal.wait_ms) == (TOKENS, 60_100)
    assert book.reserve(Reservation("c", 1, 1), limits, 60_099, TTL).refused
    assert not book.reserve(Reservation("c", 1, 1), limits, 60_100, TTL).refused


def test_repeated_calls_do_not_count_twice() -> None:
    book, limits = TenantQuota(), QuotaLimits(10, 600, 0)
    for _ in range(2):
        book.reserve(Reservation("a", 1, 100), limits, 0, TTL)
    assert book.levels == Levels(9 * UNIT, 500 * UNIT)
    assert [book.settle("a", 50, limits, 0, TTL) for _ in range(2)] == [True, False]
    assert book.levels == Levels(9 * UNIT, 550 * UNIT)


def test_a_request_that_did_not_begin_is_returned_in_full() -> None:
    book, limits = TenantQuota(), QuotaLimits(10, 600, 0)
    book.reserve(Reservation("a", 1, 100), limits, 0, TTL)
    book.settle("a", None, limits, 0, TTL)
    assert book.levels == Levels(capacity(10), capacity(600))


def test_an_expired_reservation_is_settled_with_its_last_reported_use() -> None:
    book, limits = TenantQuota(), QuotaLimits(0, 600, 1)
    book.reserve(Reservation("a", 1, 400), limits, 0, TTL)
    assert book.renew({"a": 150, "never": 3}, limits, 10_000, TTL) == ["never"]
    assert book.reserve(Reservation("b", 1, 1), limits, 10_000 + TTL - 1, TTL).refused == CONCURRENCY
    assert not book.reserve(Reservation("b", 1, 1), limits, 10_000 + TTL, TTL).refused
    assert not book.settle("a", 400, limits, 10_000 + TTL, TTL)
    assert book.renew({"a": 400}, limits, 10_000 + TTL, TTL) == ["a"]
    book.check()


def test_use_beyond_a_reservation_is_taken_at_once() -> None:
    book, limits = TenantQuota(), QuotaLimits(0, 600, 0)
    book.reserve(Reservation("a", 1, 100), limits, 0, TTL)
    book.renew({"a": 550}, limits, 0, TTL)
    book.renew({"a": 300}, limits, 0, TTL)  # a report that came late
    assert book.levels == Levels(None, 50 * UNIT)
    book.settle("a", 560, limits, 0, TTL)
    assert book.levels == Levels(None, 40 * UNIT)


def test_time_stands_still_while_the_clock_is_behind() -> None:
    book, limits = TenantQuota(), QuotaLimits(0, 600, 0)
    book.reserve(Reservation("a", 1, 600), limits, 60_000, TTL)
    assert book.reserve(Reservation("b", 1, 1), limits, 0, TTL).refused
    assert book.reserve(Reservation("b", 1, 1), limits, 60_099, TTL).refused
    assert not book.reserve(Reservation("b", 1, 1), limits, 60_100, TTL).refused


def test_a_large_clock_jump_back_does_not_starve_the_tenant() -> None:
    """The clock goes back by an hour: tokens taken before stay taken, and the buckets refill at the usual rate."""
    book, limits, back = TenantQuota(), QuotaLimits(0, 600, 0), MAX_BACK_MS + 1
    book.reserve(Reservation("a", 1, 600), limits, 3_600_000, TTL)
    refusal = book.reserve(Reservation("b", 1, 1), limits, 3_600_000 - back, TTL)
    assert (refusal.refused, refusal.wait_ms, refusal.levels) == (TOKENS, 100, Levels(None, 0))
    assert not book.reserve(Reservation("b", 1, 1), limits, 3_600_000 - back + 100, TTL).refused


def test_a_reservation_made_before_a_large_jump_back_expires_in_time() -> None:
    book, limits = TenantQuota(), QuotaLimits(0, 600, 1)
    book.reserve(Reservation("a", 1, 600), limits, 3_600_000, TTL)
    assert not book.settle("nobody", 0, limits, 0, TTL)
    assert book.reserve(Reservation("b", 1, 0), limits, TTL - 1, TTL).refused == CONCURRENCY
    assert not book.reserve(Reservation("b", 1, 600), limits, TTL, TTL).refused


def test_changed_limits_apply_from_the_next_call_on() -> None:
    book = TenantQuota()
    book.reserve(Reservation("a", 1, 10), QuotaLimits(0, 600, 0), 0, TTL)
    assert book.reserve(Reservation("b", 1, 6), QuotaLimits(0, 5, 0), 0, TTL).levels.tokens == capacity(5)
    assert book.reserve(Reservation("b", 1, 6), QuotaLimits(), 0, TTL).levels == Levels()
    assert book.reserve(Reservation("c", 1, 6), QuotaLimits(0, 100, 0), 0, TTL).levels.tokens == 94 * UNIT


def test_a_part_of_a_limit_is_at_least_one() -> None:
    assert QuotaLimits(10, 0, 2).share(3) == QuotaLimits(3, 0, 1)


def test_the_estimate_follows_the_outputs() -> None:
    limited = TenantQuotaState(TenantId("acme"), QuotaLimits(tokens_per_minute=100))
    assert limited.estimate(10, 10_000) == 100
    state = TenantQuotaState(TenantId("acme"), QuotaLimits())
    assert state.estimate(10, 10_000) == 10 + FIRST_GUESS
    assert state.estimate(10, 5) == 15
    for output, expected in ((1000, range(990, 1001)), (0, range(1))):
        for _ in range(100):
            entry = state.enter_locally(state.demand("r", 0, output), 1, 0, lambda entry, spent: None)
            state.end(entry, TokenUsage(0, output), 0)
        assert state.estimate(0, 10_000) in expected
