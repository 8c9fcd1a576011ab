"""Test what keeps failing: excluded after two failures in a row, for longer and longer, until it succeeds."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.routing.circuit_breaker import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, FailureBackoff
from tandem.routing.worker_view import Pair

A, B, C = (WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in "abc")


def test_one_failure_does_not_exclude_and_a_success_clears_the_link() -> None:
    links = FailureBackoff[Pair](2)
    links.failed([(A, B)], 0.0)
    assert not links.excluded(0.0)
    links.clear((A, B))
    links.failed([(A, B)], 1.0)
    assert not links.excluded(1.0)
    links.failed([(A, B)], 1.0)
    assert links.excluded(1.0) == {(A, B)}
    assert links.excluded(1.0 + FIRST_BACKOFF_S) == set()


def test_each_further_failure_excludes_the_link_for_twice_as_long_up_to_a_bound() -> None:
    links, now, shut = FailureBackoff[Pair](2), 0.0, []
    for _ in range(12):
        links.failed([(A, B)], now)
        links.failed([(A, B)], now)
        until = next(t for t in range(1, 100) if not links.excluded(now + t))
        shut.append(until)
        now += until
    assert shut[:3] == [1, 2, 4] and shut[-1] == LONGEST_BACKOFF_S


def test_failures_during_the_exclusion_do_not_count() -> None:
    links = FailureBackoff[Pair](2)
    for _ in range(10):
        links.failed([(A, B)], 0.0)
    assert not links.excluded(FIRST_BACKOFF_S)


def test_only_what_is_cleared_is_forgotten() -> None:
    links = FailureBackoff[Pair](2)
    for link in ((A, B), (B, A), (B, C)):
        links.failed([link], 0.0)
        links.failed([link], 0.0)
    assert links.failing() == {(A, B), (B, A), (B, C)}
    links.clear((A, B), (B, A))
    assert links.excluded(0.0) == {(B, C)}
