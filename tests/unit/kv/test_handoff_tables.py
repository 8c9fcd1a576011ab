"""Test both state tables of the hand-off for every pair of a state and an event."""

from __future__ import annotations

from itertools import product

import pytest

from tandem.kv.handoff import (
    HandoffError,
    LeaseEvent,
    LeaseState,
    PullEvent,
    PullState,
    next_lease,
    next_pull,
)

LEASES = {
    "RESERVED STARTED": "OFFERED",
    "RESERVED RELEASE": "RELEASED",
    "RESERVED EXPIRE": "EXPIRED",
    "OFFERED WITHDRAW": "WITHDRAWN",
    "OFFERED RELEASE": "RELEASED",
    "OFFERED EXPIRE": "EXPIRED",
    "WITHDRAWN RELEASE": "RELEASED",
    "WITHDRAWN EXPIRE": "EXPIRED",
}
PULLS = {
    "WAITING GRANTED": "READING",
    "WAITING ABANDON": "FREED",
    "READING ARRIVED": "READY",
    "READING ABANDON": "FREED",
    "READING ABANDON_READING": "DRAINING",
    "DRAINING DRAINED": "FREED",
}


@pytest.mark.parametrize(("state", "event"), list(product(LeaseState, LeaseEvent)), ids=lambda x: x.name)
def test_lease_table(state: LeaseState, event: LeaseEvent) -> None:
    expected = LEASES.get(f"{state.name} {event.name}")
    if expected is not None:
        assert next_lease(state, event).name == expected
        return
    with pytest.raises(HandoffError, match=f"{state.name} cannot take {event.name}"):
        next_lease(state, event)


@pytest.mark.parametrize(("state", "event"), list(product(PullState, PullEvent)), ids=lambda x: x.name)
def test_pull_table(state: PullState, event: PullEvent) -> None:
    expected = PULLS.get(f"{state.name} {event.name}")
    if expected is not None:
        assert next_pull(state, event).name == expected
        return
    with pytest.raises(HandoffError, match=f"{state.name} cannot take {event.name}"):
        next_pull(state, event)
