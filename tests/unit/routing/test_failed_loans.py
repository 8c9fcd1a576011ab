"""Ways over which loans fail: left out after two in a row, for longer and longer, until one comes."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.routing.failed_loans import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, FailedLoans

A, B, C = (WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in "abc")


def test_one_failure_is_no_sign_and_a_loan_that_comes_clears_the_way() -> None:
    loans = FailedLoans()
    loans.failed((A, B), 0.0)
    assert not loans.ways(0.0)
    loans.came((A, B))
    loans.failed((A, B), 1.0)
    assert not loans.ways(1.0)
    loans.failed((A, B), 1.0)
    assert loans.ways(1.0) == {(A, B)}
    assert loans.ways(1.0 + FIRST_BACKOFF_S) == set()


def test_each_further_failure_shuts_it_for_twice_as_long_up_to_a_bound() -> None:
    loans, now, shut = FailedLoans(), 0.0, []
    for _ in range(12):
        loans.failed((A, B), now)
        loans.failed((A, B), now)
        until = next(t for t in range(1, 100) if not loans.ways(now + t))
        shut.append(until)
        now += until
    assert shut[:3] == [1, 2, 4] and shut[-1] == LONGEST_BACKOFF_S


def test_loans_that_were_asked_for_before_tell_nothing_new() -> None:
    loans = FailedLoans()
    for _ in range(10):
        loans.failed((A, B), 0.0)
    assert not loans.ways(FIRST_BACKOFF_S)


def test_whoever_is_gone_is_forgotten_in_both_directions() -> None:
    loans = FailedLoans()
    for way in ((A, B), (B, A), (B, C)):
        loans.failed(way, 0.0)
        loans.failed(way, 0.0)
    loans.forget(A)
    assert loans.ways(0.0) == {(B, C)}
