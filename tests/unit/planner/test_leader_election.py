"""Test leader election on clocks that a test moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.planner.kube_error import MAX_RETRY_AFTER_S, Backoff
from tandem.planner.leader_election import Election, LeaseView

FREE = LeaseView(version="1")


def leader(at: float = 100.0) -> tuple[Election, LeaseView]:
    one = Election("p1", 15.0)
    one.saw(FREE, at)
    claim = one.claim(at)
    assert claim is not None
    held = replace(claim, version="2")
    one.claimed(held, at, at + 1)
    return one, held


def test_a_leader_counts_from_when_it_sent() -> None:
    one, held = leader(100.0)
    assert one.leads(109.9) and not one.leads(110.0), "a request that is sent before ends before the lease does"
    one.claimed(replace(held, version="3"), 105.0, 109.0)
    assert one.leads(114.9)


def test_another_one_waits_until_it_has_seen_no_change_for_a_lease() -> None:
    _, held = leader()
    other = Election("p2", 15.0)
    other.saw(held, 1_000_000.0)  # another machine's clock
    assert other.claim(1_000_014.9) is None
    other.saw(replace(held, renewed="later", version="3"), 1_000_014.9)
    assert other.claim(1_000_029.8) is None
    claim = other.claim(1_000_029.9)
    assert claim is not None and (claim.holder, claim.num_changes, claim.version) == ("p2", 2, "3")


def test_a_longer_lease_than_one_s_own_is_waited_for() -> None:
    _, held = leader()
    other = Election("p2", 3.0)
    other.saw(held, 0.0)
    assert other.claim(14.9) is None and other.claim(15.0) is not None


def test_who_sees_another_s_name_leads_no_more() -> None:
    one, held = leader(100.0)
    one.saw(replace(held, holder="p2", version="3"), 101.0)
    assert not one.leads(101.0) and one.claim(101.0) is None and one.resigned() is None


def test_who_resigns_leaves_it_to_anybody() -> None:
    one, _ = leader(100.0)
    left = one.resigned()
    assert left is not None and left.holder == "" and not one.leads(101.0)
    other = Election("p2", 15.0)
    other.saw(replace(left, version="4"), 50.0)
    assert other.claim(50.0) is not None


@pytest.mark.parametrize("fraction", [0.0, 0.999])
def test_waits_double_to_a_limit_and_respect_retry_after(fraction: float) -> None:
    backoff = Backoff(lambda: fraction, first_s=1.0, most_s=10.0)
    waits = [backoff.failed() for _ in range(6)]
    assert waits == [pytest.approx(base * (1 - fraction / 2)) for base in (1, 2, 4, 8, 10, 10)]
    assert backoff.failed(30.0) == 30.0 and backoff.failed(1e9) == MAX_RETRY_AFTER_S
    backoff.worked()
    assert backoff.failed() == pytest.approx(1 - fraction / 2)
    for _ in range(2000):
        backoff.failed()
