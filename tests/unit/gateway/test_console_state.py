"""Test what the console keeps: the last answers and figures by time, lane and tenant, all of it bounded."""

from __future__ import annotations

import pytest

from tandem.core.ids import WorkerId
from tandem.gateway.console.history import (
    MAX_TENANTS,
    NUM_RECORDS,
    NUM_SLICES,
    NUM_TENANT_SLICES,
    OTHER,
    SLICE_S,
    TENANT_SLICE_S,
    ConsoleState,
    percentiles,
)
from tandem.gateway.telemetry.kv_flows import MAX_FLOWS, Flow, Flows
from tandem.gateway.telemetry.usage import Usage
from tests.unit.gateway.records import record

NOW = 1000.0


def filled(count: int) -> ConsoleState:
    state = ConsoleState()
    for index in range(count):
        state.add(record(id=str(index + 1)), NOW)
    return state


@pytest.mark.parametrize(("since", "first", "count"), [(0, "5", 5), (3, "5", 2), (5, "", 0), (9, "", 0)])
def test_only_new_answers_are_reported_newest_first(since: int, first: str, count: int) -> None:
    found = filled(5).records(since, None)
    assert len(found) == count
    assert [number for number, _ in found] == list(range(5, 5 - count, -1))
    assert not found or found[0][1].id == first


def test_only_the_last_answers_are_kept() -> None:
    state = filled(NUM_RECORDS + 7)
    found = state.records(0, None)
    assert (len(found), found[-1][0], state.number) == (NUM_RECORDS, 8, NUM_RECORDS + 7)


def test_a_tenant_s_own_answers_keep_their_numbers() -> None:
    state = ConsoleState()
    for tenant in ("a", "b", "a"):
        state.add(record(tenant=tenant), NOW)
    assert [number for number, _ in state.records(0, "a")] == [3, 1]
    assert [number for number, _ in state.records(1, "a")] == [3]
    assert state.records(0, "c") == []


def test_slices_of_time_have_percentiles_by_lane() -> None:
    state = ConsoleState()
    for milliseconds in range(1, 101):
        state.add(record(first_token_s=milliseconds / 1e3, lane="batch"), NOW)
    state.add(record(token_s=None, first_token_s=None, outcome="quota_exceeded"), NOW + SLICE_S)
    first, second = state.slices(0, NOW + SLICE_S)
    assert second.index == first.index + 1
    assert percentiles(first.figures["batch"].first_s) == pytest.approx((0.0505, 0.09901))
    assert percentiles(second.figures["interactive"].first_s) is None
    assert [lane.num_failed for each in (first, second) for lane in each.figures.values()] == [0, 1]
    recent = state.recent(2, NOW + SLICE_S)
    assert (recent.num_answers, recent.num_failed) == (101, 1)
    assert (recent.first_s.count, recent.num_prompt) == (100, 1010)
    assert state.recent(1, NOW + SLICE_S).num_answers == 1


def test_a_time_slice_is_reported_again_only_after_it_changed() -> None:
    state = ConsoleState()
    state.add(record(), NOW)
    state.add(record(), NOW + SLICE_S)
    assert len(list(state.slices(0, NOW + SLICE_S))) == 2
    assert len(list(state.slices(1, NOW + SLICE_S))) == 1
    assert list(state.slices(2, NOW + SLICE_S)) == []


def test_time_slices_expire_and_are_bounded() -> None:
    state = ConsoleState()
    for index in range(3 * NUM_SLICES):
        state.add(record(), NOW + index * SLICE_S)
    last = NOW + (3 * NUM_SLICES - 1) * SLICE_S
    assert len(list(state.slices(0, last))) == NUM_SLICES
    assert len(list(state.slices(0, last + 10 * SLICE_S))) == NUM_SLICES - 10
    assert state.recent(NUM_SLICES, last + NUM_SLICES * SLICE_S).num_answers == 0


def test_tenants_are_added_up_over_minutes_and_bounded() -> None:
    state = ConsoleState()
    for index in range(MAX_TENANTS + 20):
        state.add(record(tenant=f"t{index}"), NOW)
    state.add(record(tenant="t1", usage=Usage(5, 1, None), outcome="internal", first_token_s=None), NOW)
    state.add(record(tenant="t1"), NOW + TENANT_SLICE_S)
    found = state.tenants(NOW + TENANT_SLICE_S)
    assert len(found) == MAX_TENANTS + 1 and found[OTHER].num_answers == 20
    one = found["t1"]
    assert (one.num_answers, one.num_failed, one.num_prompt, one.num_cached, one.num_output) == (3, 1, 25, 4, 9)
    assert (one.num_first, one.first_sum_s) == (2, pytest.approx(0.2))
    assert set(state.tenants(NOW + NUM_TENANT_SLICES * TENANT_SLICE_S)) == {"t1"}


def test_a_client_that_leaves_is_no_failure() -> None:
    state = ConsoleState()
    state.add(record(outcome="cancelled"), NOW)
    assert state.recent(1, NOW).num_failed == 0


def test_flows_add_up_and_the_latest_are_listed_first() -> None:
    flows, (a, b) = Flows(), (WorkerId("a"), WorkerId("b"))
    flows.moved(a, b, "handoff", 10)
    flows.moved(b, a, "prefix", 5)
    flows.moved(a, b, "handoff", 20)
    assert list(flows.latest(9)) == [Flow(a, b, "handoff", 2, 30), Flow(b, a, "prefix", 1, 5)]
    assert list(flows.latest(1)) == [Flow(a, b, "handoff", 2, 30)]
    for index in range(2 * MAX_FLOWS):
        flows.moved(a, WorkerId(f"w{index}"), "handoff", 1)
    assert len(list(flows.latest(10 * MAX_FLOWS))) == MAX_FLOWS
