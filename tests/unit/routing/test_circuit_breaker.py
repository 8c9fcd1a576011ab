"""Test that a failing worker is excluded, twice as long after each failed trial, and that one request tries it before
others follow."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.routing.circuit_breaker import (
    BURST_S,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    NUM_FAILURES,
    BreakerState,
    CircuitBreakers,
)

A = WorkerRef(WorkerId("a"), Incarnation(1), "a:1")
B = WorkerRef(WorkerId("b"), Incarnation(1), "b:1")


def opened() -> CircuitBreakers:
    """Return breakers of which one has opened at 100 s for its first back-off."""
    breaker = CircuitBreakers()
    for i in range(NUM_FAILURES):
        breaker.failed([A], 100.0 - (NUM_FAILURES - 1 - i) * BURST_S)
    return breaker


def test_consecutive_failures_open_the_breaker_of_that_worker_only() -> None:
    breaker = CircuitBreakers()
    for i in range(NUM_FAILURES - 1):
        breaker.failed([A, B], i * BURST_S)
    assert breaker.excluded(10.0) == set()
    assert breaker.states(10.0) == {"a": BreakerState.CLOSED, "b": BreakerState.CLOSED}
    breaker.clear(B)
    breaker.failed([A, B], 10.0)
    assert breaker.excluded(10.0) == {A} and breaker.states(10.0)[WorkerId("a")] is BreakerState.OPEN
    assert breaker.why(10.25) == "a excluded for 0.8 s after failures"


def test_simultaneous_failures_of_one_cause_count_once() -> None:
    breaker = CircuitBreakers()
    for _ in range(50):
        breaker.failed([A], 1.0)
    assert breaker.excluded(1.0) == set()


def test_after_the_back_off_one_request_is_the_trial() -> None:
    breaker = opened()
    breaker.on_attempt([A], 100.5)
    assert breaker.excluded(100.9) == {A}, "a trial does not begin before its time"
    later = 100.0 + FIRST_BACKOFF_S
    assert breaker.excluded(later) == set() and breaker.states(later)[WorkerId("a")] is BreakerState.TRIAL
    breaker.on_attempt([A, B], later)
    assert breaker.excluded(later) == {A} and breaker.states(later)[WorkerId("a")] is BreakerState.TRIAL
    breaker.clear(A)
    assert breaker.excluded(later) == set() and breaker.states(later) == {}


def test_a_failed_trial_doubles_the_back_off_up_to_a_limit() -> None:
    breaker, now, backoff_s = opened(), 100.0, FIRST_BACKOFF_S
    for _ in range(10):
        now += backoff_s
        assert breaker.excluded(now) == set()
        breaker.on_attempt([A], now)
        breaker.failed([A], now)
        backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        assert breaker.excluded(now + 0.99 * backoff_s) == {A}
    assert backoff_s == LONGEST_BACKOFF_S


def test_a_trial_without_a_result_is_followed_by_another() -> None:
    breaker = opened()
    breaker.on_attempt([A], 101.0)
    assert breaker.excluded(101.0 + FIRST_BACKOFF_S) == set()


def test_without_another_worker_trials_continue_now_and_then() -> None:
    breaker = opened()
    breaker.on_attempt([A], 101.0)
    breaker.failed([A], 101.5)
    assert breaker.excluded(102.6) == {A} and breaker.resting(102.4) == {A}
    assert breaker.resting(102.5) == set(), "it is excluded for longer than it rests"
    breaker.on_attempt([A], 102.6)
    assert breaker.resting(102.7) == {A} and breaker.states(102.7)[WorkerId("a")] is BreakerState.TRIAL
    assert breaker.excluded(103.49) == {A} and breaker.excluded(103.5) == set(), "its back-off is as long as before"
    breaker.clear(A)
    assert breaker.resting(102.7) == set()


def test_late_failures_of_an_excluded_worker_change_nothing() -> None:
    breaker = opened()
    breaker.failed([A], 100.9)
    assert breaker.excluded(100.0 + FIRST_BACKOFF_S) == set()


def test_a_new_incarnation_begins_without_a_record() -> None:
    breaker = opened()
    breaker.clear(A)
    assert breaker.excluded(100.1) == set() and breaker.why(100.1) == ""
