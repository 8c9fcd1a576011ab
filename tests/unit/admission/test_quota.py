"""Buckets and reservations, case by case; the property tests try them at random."""

from __future__ import annotations

import pytest

from tandem.admission.bucket import MAX_LIMIT, UNIT, filled, full, wait_ms
from tandem.admission.estimate import FIRST_GUESS, OutputGuess
from tandem.admission.quota import CONCURRENCY, MAX_BACK_MS, REQUESTS, TOKENS, Ask, Levels, Limits, QuotaBook

TTL = 20_000


def test_a_limit_comes_back_in_a_minute_to_the_unit() -> None:
    level = 0
    for _ in range(60_000):
        level = filled(level, 7, 1)
    assert level == full(7) == filled(0, 7, 60_000) == filled(full(7), 7, 1)


@pytest.mark.parametrize("limit", [1, 7, 59, 60_001, MAX_LIMIT])
@pytest.mark.parametrize("level", [-(10**12), -1, 0, 1, 59_999])
def test_the_wait_is_the_first_millisecond_that_is_enough(limit: int, level: int) -> None:
    needed = min(UNIT, full(limit))
    wait = wait_ms(level, limit, needed)
    assert level + limit * wait >= needed > level + limit * (wait - 1)


def test_a_refusal_takes_nothing_and_says_which_limit_and_how_long() -> None:
    book, limits = QuotaBook(), Limits(60, 600, 1)
    assert book.reserve(Ask("a", 1, 100), limits, 0, TTL).refused == ""
    levels = book.levels
    assert book.reserve(Ask("b", 1, 1), limits, 0, TTL).refused == CONCURRENCY
    refusal = book.reserve(Ask("b", 1, 501), limits, 0, TTL)
    assert (refusal.refused, refusal.wait_ms) == (TOKENS, 100)
    assert book.reserve(Ask("b", 61, 501), limits, 0, TTL).refused == REQUESTS
    assert book.levels == levels and list(book.open) == ["a"]


def test_what_was_not_used_goes_back_and_what_was_too_much_is_owed() -> None:
    book, limits = QuotaBook(), Limits(0, 600, 0)
    book.reserve(Ask("a", 1, 500), limits, 0, TTL)
    assert book.settle("a", 100, limits, 0, TTL) and book.levels == Levels(None, 500 * UNIT)
    book.reserve(Ask("b", 1, 500), limits, 0, TTL)
    assert book.settle("b", 1100, limits, 0, TTL) and book.levels == Levels(None, -600 * UNIT)
    refusal = book.reserve(Ask("c", 1, 1), limits, 0, TTL)
    assert (refusal.refused, refusal.wait_ms) == (TOKENS, 60_100)
    assert book.reserve(Ask("c", 1, 1), limits, 60_099, TTL).refused
    assert not book.reserve(Ask("c", 1, 1), limits, 60_100, TTL).refused


def test_nothing_counts_twice() -> None:
    book, limits = QuotaBook(), Limits(10, 600, 0)
    for _ in range(2):
        book.reserve(Ask("a", 1, 100), limits, 0, TTL)
    assert book.levels == Levels(9 * UNIT, 500 * UNIT)
    assert [book.settle("a", 50, limits, 0, TTL) for _ in range(2)] == [True, False]
    assert book.levels == Levels(9 * UNIT, 550 * UNIT)


def test_a_request_that_never_began_is_as_if_it_had_never_been() -> None:
    book, limits = QuotaBook(), Limits(10, 600, 0)
    book.reserve(Ask("a", 1, 100), limits, 0, TTL)
    book.settle("a", None, limits, 0, TTL)
    assert book.levels == Levels(full(10), full(600))


def test_whose_gateway_is_gone_is_settled_with_what_it_told() -> None:
    book, limits = QuotaBook(), Limits(0, 600, 1)
    book.reserve(Ask("a", 1, 400), limits, 0, TTL)
    assert book.renew({"a": 150, "never": 3}, limits, 10_000, TTL) == ["never"]
    assert book.reserve(Ask("b", 1, 1), limits, 10_000 + TTL - 1, TTL).refused == CONCURRENCY
    assert not book.reserve(Ask("b", 1, 1), limits, 10_000 + TTL, TTL).refused
    assert not book.settle("a", 400, limits, 10_000 + TTL, TTL)
    assert book.renew({"a": 400}, limits, 10_000 + TTL, TTL) == ["a"]
    book.check()


def test_what_is_used_beyond_a_reservation_is_taken_at_once() -> None:
    book, limits = QuotaBook(), Limits(0, 600, 0)
    book.reserve(Ask("a", 1, 100), limits, 0, TTL)
    book.renew({"a": 550}, limits, 0, TTL)
    book.renew({"a": 300}, limits, 0, TTL)  # a report that came late
    assert book.levels == Levels(None, 50 * UNIT)
    book.settle("a", 560, limits, 0, TTL)
    assert book.levels == Levels(None, 40 * UNIT)


def test_a_clock_that_goes_back_stands_still() -> None:
    book, limits = QuotaBook(), Limits(0, 600, 0)
    book.reserve(Ask("a", 1, 600), limits, 60_000, TTL)
    assert book.reserve(Ask("b", 1, 1), limits, 0, TTL).refused
    assert book.reserve(Ask("b", 1, 1), limits, 60_099, TTL).refused
    assert not book.reserve(Ask("b", 1, 1), limits, 60_100, TTL).refused


def test_a_clock_that_was_far_ahead_starves_nobody() -> None:
    """An hour ahead, and then back: what was taken there stays taken, and comes back as fast as ever."""
    book, limits, back = QuotaBook(), Limits(0, 600, 0), MAX_BACK_MS + 1
    book.reserve(Ask("a", 1, 600), limits, 3_600_000, TTL)
    refusal = book.reserve(Ask("b", 1, 1), limits, 3_600_000 - back, TTL)
    assert (refusal.refused, refusal.wait_ms, refusal.levels) == (TOKENS, 100, Levels(None, 0))
    assert not book.reserve(Ask("b", 1, 1), limits, 3_600_000 - back + 100, TTL).refused


def test_what_was_reserved_by_a_clock_far_ahead_lapses_in_its_time() -> None:
    book, limits = QuotaBook(), Limits(0, 600, 1)
    book.reserve(Ask("a", 1, 600), limits, 3_600_000, TTL)
    assert not book.settle("nobody", 0, limits, 0, TTL)
    assert book.reserve(Ask("b", 1, 0), limits, TTL - 1, TTL).refused == CONCURRENCY
    assert not book.reserve(Ask("b", 1, 600), limits, TTL, TTL).refused


def test_limits_that_change_hold_from_the_next_call_on() -> None:
    book = QuotaBook()
    book.reserve(Ask("a", 1, 10), Limits(0, 600, 0), 0, TTL)
    assert book.reserve(Ask("b", 1, 6), Limits(0, 5, 0), 0, TTL).levels.tokens == full(5)
    assert book.reserve(Ask("b", 1, 6), Limits(), 0, TTL).levels == Levels()
    assert book.reserve(Ask("c", 1, 6), Limits(0, 100, 0), 0, TTL).levels.tokens == 94 * UNIT


def test_parts_of_a_limit_are_never_none_of_it() -> None:
    assert Limits(10, 0, 2).share(3) == Limits(3, 0, 1)


def test_the_guess_follows_what_comes_out() -> None:
    guess = OutputGuess()
    assert guess.estimate(10, 10_000, 0) == 10 + FIRST_GUESS
    assert guess.estimate(10, 5, 0) == 15
    assert guess.estimate(10, 10_000, 100) == 100
    for _ in range(100):
        guess.learn(1000)
    assert guess.estimate(0, 10_000, 0) in range(990, 1001)
    for _ in range(100):
        guess.learn(0)
    assert guess.estimate(0, 10_000, 0) == 0
