"""Test the order of requests: lanes, tenants by tokens and weights, priorities and arrival, and the queue's
counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.fair_queue import FairQueue
from tandem.admission.tenant_queue import FlowKey, QueueItem
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane

A, B, C = (TenantId(name) for name in "abc")


def item(
    tenant: TenantId, num_tokens: int, *, lane: Lane = Lane.INTERACTIVE, weight: float = 1.0, priority: int = 0
) -> QueueItem:
    return QueueItem(flow_key=FlowKey(lane, tenant), num_tokens=num_tokens, weight=weight, priority=priority)


def queue_of(*tickets: tuple[str, QueueItem]) -> FairQueue:
    queue = FairQueue()
    for name, one in tickets:
        queue.push(RequestId(name), one)
    return queue


def pop_all(queue: FairQueue) -> list[str]:
    order: list[str] = []
    while (first := queue.first()) is not None:
        queue.pop(first)
        queue.check()
        order.append(first)
    return order


def test_within_a_tenant_priority_goes_first_and_then_the_shortest() -> None:
    queue = queue_of(
        ("r1", item(A, 10)),
        ("r2", item(A, 1)),
        ("r3", item(A, 99, priority=-1)),
        ("r4", item(A, 1, priority=1)),
    )
    assert pop_all(queue) == ["r3", "r2", "r1", "r4"]


def test_lanes_are_strict() -> None:
    queue = queue_of(
        ("batch", item(A, 1, lane=Lane.BATCH)),
        ("standard", item(B, 1, lane=Lane.STANDARD)),
        ("long", item(C, 9000)),
        ("short", item(A, 1)),
    )
    assert pop_all(queue) == ["short", "long", "standard", "batch"]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    queue = queue_of(*((f"a{i}", item(A, 300)) for i in range(3)), *((f"b{i}", item(B, 100)) for i in range(9)))
    assert pop_all(queue) == ["b0", "b1", "a0", "b2", "b3", "b4", "a1", "b5", "b6", "b7", "a2", "b8"]


def test_a_tenant_with_twice_the_weight_gets_twice_the_tokens() -> None:
    queue = queue_of(
        *((f"a{i}", item(A, 10)) for i in range(30)), *((f"b{i}", item(B, 10, weight=2)) for i in range(30))
    )
    first = pop_all(queue)[:30]
    assert 19 <= sum(name.startswith("b") for name in first) <= 21


@pytest.mark.parametrize(("weight", "expected"), [(10.0, ["b", "a"]), (0.1, ["a", "b"])])
def test_what_other_gateways_charged_counts_by_weight_before_a_tenants_first_request(
    weight: float, expected: list[str]
) -> None:
    queue = queue_of(("a0", item(A, 500)))
    assert pop_all(queue) == ["a0"]
    queue.push(RequestId("a"), item(A, 10))
    queue.add_to_counter(item(B, 1).flow_key, 1000)
    first, before = item(B, 10, weight=weight), queue.num_ahead(item(B, 10, weight=weight))
    assert before == (0 if weight == 10 else 10)
    queue.push(RequestId("b"), first)
    queue.add_to_counter(first.flow_key, 10)
    assert queue._flow(first.flow_key).counter == pytest.approx(1010 / weight)
    assert pop_all(queue) == expected


def test_an_idle_tenant_does_not_keep_unused_capacity() -> None:
    queue = queue_of(*((f"a{i}", item(A, 100)) for i in range(20)))
    for i in range(10):
        queue.pop(RequestId(f"a{i}"))
    for i in range(10):
        queue.push(RequestId(f"b{i}"), item(B, 100))
    order = pop_all(queue)
    assert abs(sum(name.startswith("b") for name in order[:10]) - 5) <= 1


def test_a_short_request_goes_ahead_of_a_long_one_that_waits_for_capacity() -> None:
    queue = queue_of(("long", item(A, 8000)))
    assert queue.first() == "long"
    queue.push(RequestId("short"), item(B, 50))
    assert queue.first() == "short"


def test_a_rejected_request_waits_at_its_old_place_and_is_not_charged() -> None:
    queue, one = FairQueue(), item(A, 100)
    number = queue.push(RequestId("r1"), one)
    queue.push(RequestId("r2"), one)
    credit = queue.pop(RequestId("r1"))
    queue.put_back(RequestId("r1"), one, number, credit)
    assert queue.served()[one.flow_key] == 0
    assert pop_all(queue) == ["r1", "r2"]


def test_a_removed_request_is_not_first() -> None:
    queue = queue_of(("r1", item(A, 1)), ("r2", item(A, 1)), ("r3", item(B, 5)))
    queue.remove(RequestId("r1"))
    queue.remove(RequestId("r1"))
    queue.check()
    assert len(queue) == 2 and pop_all(queue) == ["r2", "r3"] and queue.first() is None


def test_lanes_can_be_skipped_and_are_counted() -> None:
    queue = queue_of(
        ("b", item(A, 1, lane=Lane.BATCH)), ("i", item(A, 9)), ("s", item(B, 5, lane=Lane.STANDARD)), ("c", item(B, 9))
    )
    lanes = frozenset(Lane)
    assert queue.first() == queue.first({Lane.STANDARD, Lane.BATCH}) == "i"
    assert queue.first({Lane.INTERACTIVE}) == "s" and queue.first({Lane.INTERACTIVE, Lane.STANDARD}) == "b"
    assert queue.first(lanes) is None
    assert [queue.num_waiting(lane) for lane in Lane] == [2, 1, 1]
    assert len(pop_all(queue)) == 4 and [queue.num_waiting(lane) for lane in Lane] == [0, 0, 0]


def test_requests_of_lanes_that_are_no_rivals_are_not_ahead() -> None:
    queue = queue_of(("i", item(A, 9)), ("s", item(B, 5, lane=Lane.STANDARD)), ("b", item(A, 2, lane=Lane.BATCH)))
    mine = item(A, 3, lane=Lane.BATCH)
    assert queue.num_ahead(mine) == 16 and queue.num_ahead(mine, {Lane.BATCH, Lane.STANDARD}) == 7
    assert queue.num_ahead(mine, {Lane.BATCH}) == 2


def test_output_is_charged_as_it_is_sampled() -> None:
    queue = queue_of(*((f"{t}{i}", item(TenantId(t), 10)) for i in range(4) for t in "ab"))
    queue.charge(FlowKey(Lane.INTERACTIVE, A), 25)
    assert pop_all(queue)[:3] == ["b0", "b1", "b2"]


def test_num_ahead_counts_the_requests_that_go_first() -> None:
    queue = queue_of(*((f"a{i}", item(A, 100)) for i in range(10)))
    assert queue.num_ahead(item(A, 100)) == 1000
    assert queue.num_ahead(item(A, 10)) == 0
    assert queue.num_ahead(item(B, 250)) == 250
    assert queue.num_ahead(item(B, 250, weight=5)) == 50
    assert queue.num_ahead(item(B, 250, lane=Lane.BATCH)) == 1000
    queue.push(RequestId("c"), item(C, 7, lane=Lane.STANDARD))
    assert queue.num_ahead(item(B, 250)) == 250


def test_the_newest_request_of_the_fullest_tenant_is_dropped() -> None:
    queue = queue_of(("a1", item(A, 1)), ("a2", item(A, 1)), ("a3", item(A, 1, lane=Lane.BATCH)), ("b1", item(B, 9)))
    assert queue.fullest() == "a3"
    assert queue_of(("a1", item(A, 1, weight=4)), ("a2", item(A, 1, weight=4)), ("b1", item(B, 9))).fullest() == "b1"
    assert FairQueue().fullest() is None


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pop", "remove", "back", "charge", "absorb"]),
        st.sampled_from([A, B, C]),
        st.integers(1, 500),
        st.sampled_from(Lane),
        st.integers(0, 10**6),
    ),
    max_size=120,
)


def check_first(queue: FairQueue, waiting: dict[RequestId, tuple[QueueItem, int]]) -> None:
    """Check `first` against the definition: the most urgent lane, the tenant whose first request ends soonest, its
    first request."""
    first = queue.first()
    assert (first is None) == (not waiting)
    if first is None:
        return
    one, number = waiting[first]
    assert one.flow_key.lane == min(t.flow_key.lane for t, _ in waiting.values())
    ends: list[float] = []
    for flow_key in {t.flow_key for t, _ in waiting.values() if t.flow_key.lane == one.flow_key.lane}:
        own = [(t, n) for t, n in waiting.values() if t.flow_key == flow_key]
        heads = [
            min(own, key=lambda w: (w[0].priority, w[1])),
            min(own, key=lambda w: (w[0].priority, w[0].num_tokens, w[1])),
        ]
        if flow_key == one.flow_key:
            assert (one, number) in heads, "neither the oldest nor the shortest of the most urgent"
        ends.append(min(queue._flow(flow_key).counter + t.num_tokens / t.weight for t, _ in heads))
    longest = max(t.num_tokens / t.weight for t, _ in waiting.values())
    assert queue._flow(one.flow_key).counter + one.num_tokens / one.weight <= min(ends) + longest + 1e-6


@given(OPERATIONS)
def test_the_totals_balance_and_first_matches_the_definition(
    operations: list[tuple[str, TenantId, int, Lane, int]],
) -> None:
    queue = FairQueue()
    waiting: dict[RequestId, tuple[QueueItem, int]] = {}
    sent: dict[RequestId, tuple[QueueItem, int, int]] = {}
    for step, (verb, tenant, tokens, lane, pick) in enumerate(operations):
        if verb == "push":
            one = item(tenant, tokens, lane=lane, weight=1.0 + (tenant == B), priority=tokens % 3)
            waiting[RequestId(f"r{step:03}")] = one, queue.push(RequestId(f"r{step:03}"), one)
        elif verb == "pop" and (first := queue.first()) is not None:
            credit = queue.pop(first)
            sent[first] = *waiting.pop(first), credit
        elif verb == "remove" and waiting:
            key = sorted(waiting)[pick % len(waiting)]
            queue.remove(key)
            del waiting[key]
        elif verb == "back" and sent:
            key = sorted(sent)[pick % len(sent)]
            *held, credit = sent.pop(key)
            waiting[key] = held[0], held[1]
            queue.put_back(key, *waiting[key], credit)
        elif verb == "charge":
            queue.charge(FlowKey(lane, tenant), tokens)
        elif verb == "absorb":
            queue.add_to_counter(FlowKey(lane, tenant), tokens)
        queue.check()
        assert len(queue) == len(waiting)
        check_first(queue, waiting)


def served_by(queues: list[FairQueue], tenant: TenantId) -> int:
    return sum(queue.served().get(FlowKey(Lane.INTERACTIVE, tenant), 0) for queue in queues)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_two_busy_tenants_differ_by_at_most_the_bound(of_a: list[int], of_b: list[int]) -> None:
    queue, longest = FairQueue(), max(of_a + of_b)
    for i in range(200):
        queue.push(RequestId(f"a{i}"), item(A, of_a[i % len(of_a)]))
        queue.push(RequestId(f"b{i}"), item(B, of_b[i % len(of_b)]))
    for _ in range(150):
        first = queue.first()
        assert first is not None
        queue.pop(first)
        assert abs(served_by([queue], A) - served_by([queue], B)) <= 2 * longest


@pytest.mark.parametrize("delay", [0, 1, 7])
@pytest.mark.parametrize("period", [1, 10])
def test_two_gateways_are_fair_up_to_unreported_tokens(period: int, delay: int) -> None:
    """A floods both, B waits at the second alone. Each serves one request in a turn; counters of `period` turns arrive
    `delay` turns later."""
    queues, tokens = [FairQueue(), FairQueue()], 100
    reports: list[tuple[int, int, FlowKey, int]] = []
    seen = [dict.fromkeys((A, B), 0), dict.fromkeys((A, B), 0)]
    for i in range(400):
        queues[0].push(RequestId(f"a{i}"), item(A, tokens))
        queues[1].push(RequestId(f"c{i}"), item(A, tokens))
        queues[1].push(RequestId(f"b{i}"), item(B, tokens))
    bound = 2 * tokens + 2 * tokens * (period + delay)
    for turn in range(300):
        for queue in queues:
            first = queue.first()
            assert first is not None
            queue.pop(first)
        if turn % period == 0:
            for producer in (0, 1):
                for tenant in (A, B):
                    flow_key = FlowKey(Lane.INTERACTIVE, tenant)
                    fresh = queues[producer].served().get(flow_key, 0) - seen[producer][tenant]
                    seen[producer][tenant] += fresh
                    reports.append((turn + delay, 1 - producer, flow_key, fresh))
        for _, consumer, flow_key, fresh in [one for one in reports if one[0] == turn]:
            queues[consumer].add_to_counter(flow_key, fresh)
        assert abs(served_by(queues, A) - served_by(queues, B)) <= bound


def test_a_tenant_that_was_served_more_has_more_ahead() -> None:
    """The tenant's counter is above the lane's, because its last request has just been served."""
    queue = queue_of(("a1", item(A, 500)))
    queue.pop(RequestId("a1"))
    queue.push(RequestId("b1"), item(B, 300))
    assert queue._flow(item(A, 1).flow_key).counter > queue._flow(item(B, 1).flow_key).counter
    assert queue.num_ahead(item(A, 100)) == 300
    assert queue.num_ahead(item(C, 100)) == 100
