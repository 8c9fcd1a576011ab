"""Test links over which prefix fetches fail: excluded after two failures in a row, for longer and longer, until a fetch
succeeds."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.routing.prefix_fetch_backoff import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, PrefixFetchBackoff

A, B, C = (WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in "abc")


def test_one_failure_does_not_exclude_and_a_success_clears_the_link() -> None:
    prefix_fetches = PrefixFetchBackoff()
    prefix_fetches.failed((A, B), 0.0)
    assert not prefix_fetches.links(0.0)
    prefix_fetches.on_success((A, B))
    prefix_fetches.failed((A, B), 1.0)
    assert not prefix_fetches.links(1.0)
    prefix_fetches.failed((A, B), 1.0)
    assert prefix_fetches.links(1.0) == {(A, B)}
    assert prefix_fetches.links(1.0 + FIRST_BACKOFF_S) == set()


def test_each_further_failure_excludes_the_link_for_twice_as_long_up_to_a_bound() -> None:
    prefix_fetches, now, shut = PrefixFetchBackoff(), 0.0, []
    for _ in range(12):
        prefix_fetches.failed((A, B), now)
        prefix_fetches.failed((A, B), now)
        until = next(t for t in range(1, 100) if not prefix_fetches.links(now + t))
        shut.append(until)
        now += until
    assert shut[:3] == [1, 2, 4] and shut[-1] == LONGEST_BACKOFF_S


def test_fetches_requested_before_the_exclusion_do_not_count() -> None:
    prefix_fetches = PrefixFetchBackoff()
    for _ in range(10):
        prefix_fetches.failed((A, B), 0.0)
    assert not prefix_fetches.links(FIRST_BACKOFF_S)


def test_a_gone_worker_is_forgotten_in_both_directions() -> None:
    prefix_fetches = PrefixFetchBackoff()
    for link in ((A, B), (B, A), (B, C)):
        prefix_fetches.failed(link, 0.0)
        prefix_fetches.failed(link, 0.0)
    prefix_fetches.forget(A)
    assert prefix_fetches.links(0.0) == {(B, C)}
