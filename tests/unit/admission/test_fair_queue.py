"""Whose turn it is: lanes, tenants by tokens and weights, priorities and arrival, and what a queue's counters say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.fair_queue import FairQueue
from tandem.admission.queue_item import FlowKey, QueueItem
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane

A, B, C = (TenantId(name) for name in "abc")


def ticket(
    tenant: TenantId, num_tokens: int, *, lane: Lane = Lane.INTERACTIVE, weight: float = 1.0, priority: int = 0
) -> QueueItem:
    return QueueItem(lane=lane, tenant=tenant, num_tokens=num_tokens, weight=weight, priority=priority)


def queue_of(*tickets: tuple[str, QueueItem]) -> FairQueue:
    queue = FairQueue()
    for name, one in tickets:
        queue.push(RequestId(name), one)
    return queue


def drained(queue: FairQueue) -> list[str]:
    order: list[str] = []
    while (first := queue.first()) is not None:
        queue.pop(first)
        queue.check()
        order.append(first)
    return order


def test_of_one_tenant_priority_goes_first_and_then_the_shortest() -> None:
    queue = queue_of(
        ("r1", ticket(A, 10)),
        ("r2", ticket(A, 1)),
        ("r3", ticket(A, 99, priority=-1)),
        ("r4", ticket(A, 1, priority=1)),
    )
    assert drained(queue) == ["r3", "r2", "r1", "r4"]


def test_lanes_are_strict_whoever_waits_in_them() -> None:
    queue = queue_of(
        ("batch", ticket(A, 1, lane=Lane.BATCH)),
        ("standard", ticket(B, 1, lane=Lane.STANDARD)),
        ("long", ticket(C, 9000)),
        ("short", ticket(A, 1)),
    )
    assert drained(queue) == ["short", "long", "standard", "batch"]


def test_between_tenants_tokens_decide_and_not_requests() -> None:
    queue = queue_of(*((f"a{i}", ticket(A, 300)) for i in range(3)), *((f"b{i}", ticket(B, 100)) for i in range(9)))
    assert drained(queue) == ["b0", "b1", "a0", "b2", "b3", "b4", "a1", "b5", "b6", "b7", "a2", "b8"]


def test_a_tenant_with_twice_the_weight_gets_twice_the_tokens() -> None:
    queue = queue_of(
        *((f"a{i}", ticket(A, 10)) for i in range(30)), *((f"b{i}", ticket(B, 10, weight=2)) for i in range(30))
    )
    first = drained(queue)[:30]
    assert 19 <= sum(name.startswith("b") for name in first) <= 21


def test_who_was_away_does_not_come_back_with_what_it_did_not_use() -> None:
    queue = queue_of(*((f"a{i}", ticket(A, 100)) for i in range(20)))
    for i in range(10):
        queue.pop(RequestId(f"a{i}"))
    for i in range(10):
        queue.push(RequestId(f"b{i}"), ticket(B, 100))
    order = drained(queue)
    assert abs(sum(name.startswith("b") for name in order[:10]) - 5) <= 1


def test_a_short_request_goes_ahead_of_a_long_one_that_waits_for_room() -> None:
    queue = queue_of(("long", ticket(A, 8000)))
    assert queue.first() == "long"
    queue.push(RequestId("short"), ticket(B, 50))
    assert queue.first() == "short"


def test_what_was_refused_waits_at_its_old_place_and_is_not_charged() -> None:
    queue, one = FairQueue(), ticket(A, 100)
    number = queue.push(RequestId("r1"), one)
    queue.push(RequestId("r2"), one)
    credit = queue.pop(RequestId("r1"))
    queue.put_back(RequestId("r1"), one, number, credit)
    assert queue.served()[one.account] == 0
    assert drained(queue) == ["r1", "r2"]


def test_who_leaves_is_never_first() -> None:
    queue = queue_of(("r1", ticket(A, 1)), ("r2", ticket(A, 1)), ("r3", ticket(B, 5)))
    queue.remove(RequestId("r1"))
    queue.remove(RequestId("r1"))
    queue.check()
    assert len(queue) == 2 and drained(queue) == ["r2", "r3"] and queue.first() is None


def test_output_is_charged_as_it_comes() -> None:
    queue = queue_of(*((f"{t}{i}", ticket(TenantId(t), 10)) for i in range(4) for t in "ab"))
    queue.charge(FlowKey(Lane.INTERACTIVE, A), 25)
    assert drained(queue)[:3] == ["b0", "b1", "b2"]


def test_a_newcomer_expects_those_whose_turn_comes_before_its_own() -> None:
    queue = queue_of(*((f"a{i}", ticket(A, 100)) for i in range(10)))
    assert queue.num_ahead(ticket(A, 100)) == 1000
    assert queue.num_ahead(ticket(A, 10)) == 0
    assert queue.num_ahead(ticket(B, 250)) == 250
    assert queue.num_ahead(ticket(B, 250, weight=5)) == 50
    assert queue.num_ahead(ticket(B, 250, lane=Lane.BATCH)) == 1000
    queue.push(RequestId("c"), ticket(C, 7, lane=Lane.STANDARD))
    assert queue.num_ahead(ticket(B, 250)) == 250


def test_the_newest_of_whoever_has_most_is_to_go() -> None:
    queue = queue_of(
        ("a1", ticket(A, 1)), ("a2", ticket(A, 1)), ("a3", ticket(A, 1, lane=Lane.BATCH)), ("b1", ticket(B, 9))
    )
    assert queue.fullest() == "a3"
    assert (
        queue_of(("a1", ticket(A, 1, weight=4)), ("a2", ticket(A, 1, weight=4)), ("b1", ticket(B, 9))).fullest() == "b1"
    )
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
    """By the definition: of the most urgent lane, of the tenant whose first ends soonest, its first."""
    first = queue.first()
    assert (first is None) == (not waiting)
    if first is None:
        return
    one, number = waiting[first]
    assert one.lane == min(t.lane for t, _ in waiting.values())
    ends: list[float] = []
    for account in {t.account for t, _ in waiting.values() if t.lane == one.lane}:
        own = [(t, n) for t, n in waiting.values() if t.account == account]
        heads = [
            min(own, key=lambda w: (w[0].priority, w[1])),
            min(own, key=lambda w: (w[0].priority, w[0].num_tokens, w[1])),
        ]
        if account == one.account:
            assert (one, number) in heads, "neither the oldest nor the shortest of the most urgent"
        ends.append(min(queue.counter(account) + t.num_tokens / t.weight for t, _ in heads))
    longest = max(t.num_tokens / t.weight for t, _ in waiting.values())
    assert queue.counter(one.account) + one.num_tokens / one.weight <= min(ends) + longest + 1e-6


@given(OPERATIONS)
def test_the_books_balance_and_the_first_is_the_least_by_the_definition(
    operations: list[tuple[str, TenantId, int, Lane, int]],
) -> None:
    queue = FairQueue()
    waiting: dict[RequestId, tuple[QueueItem, int]] = {}
    sent: dict[RequestId, tuple[QueueItem, int, int]] = {}
    for step, (verb, tenant, tokens, lane, pick) in enumerate(operations):
        if verb == "push":
            one = ticket(tenant, tokens, lane=lane, weight=1.0 + (tenant == B), priority=tokens % 3)
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
            queue.absorb(FlowKey(lane, tenant), tokens)
        queue.check()
        assert len(queue) == len(waiting)
        check_first(queue, waiting)


def served_by(queues: list[FairQueue], tenant: TenantId) -> int:
    return sum(queue.served().get(FlowKey(Lane.INTERACTIVE, tenant), 0) for queue in queues)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_of_two_that_always_wait_none_gets_more_than_the_bound(of_a: list[int], of_b: list[int]) -> None:
    queue, longest = FairQueue(), max(of_a + of_b)
    for i in range(200):
        queue.push(RequestId(f"a{i}"), ticket(A, of_a[i % len(of_a)]))
        queue.push(RequestId(f"b{i}"), ticket(B, of_b[i % len(of_b)]))
    for _ in range(150):
        first = queue.first()
        assert first is not None
        queue.pop(first)
        assert abs(served_by([queue], A) - served_by([queue], B)) <= 2 * longest


@pytest.mark.parametrize("delay", [0, 1, 7])
@pytest.mark.parametrize("period", [1, 10])
def test_two_gateways_are_fair_up_to_what_they_have_not_heard(period: int, delay: int) -> None:
    """A floods both, B waits at the second alone. Each serves one request in a turn; counters of `period` turns arrive
    `delay` turns later."""
    queues, tokens = [FairQueue(), FairQueue()], 100
    told: list[tuple[int, int, FlowKey, int]] = []
    seen = [dict.fromkeys((A, B), 0), dict.fromkeys((A, B), 0)]
    for i in range(400):
        queues[0].push(RequestId(f"a{i}"), ticket(A, tokens))
        queues[1].push(RequestId(f"c{i}"), ticket(A, tokens))
        queues[1].push(RequestId(f"b{i}"), ticket(B, tokens))
    bound = 2 * tokens + 2 * tokens * (period + delay)
    for turn in range(300):
        for queue in queues:
            first = queue.first()
            assert first is not None
            queue.pop(first)
        if turn % period == 0:
            for producer in (0, 1):
                for tenant in (A, B):
                    account = FlowKey(Lane.INTERACTIVE, tenant)
                    fresh = queues[producer].served().get(account, 0) - seen[producer][tenant]
                    seen[producer][tenant] += fresh
                    told.append((turn + delay, 1 - producer, account, fresh))
        for _, consumer, account, fresh in [one for one in told if one[0] == turn]:
            queues[consumer].absorb(account, fresh)
        assert abs(served_by(queues, A) - served_by(queues, B)) <= bound


def test_a_newcomer_whose_tenant_was_served_more_expects_more_ahead() -> None:
    """Its counter is above the lane's, as that of a tenant whose last request has just been served."""
    queue = queue_of(("a1", ticket(A, 500)))
    queue.pop(RequestId("a1"))
    queue.push(RequestId("b1"), ticket(B, 300))
    assert queue.counter(ticket(A, 1).account) > queue.counter(ticket(B, 1).account)
    assert queue.num_ahead(ticket(A, 100)) == 300
    assert queue.num_ahead(ticket(C, 100)) == 100
