"""Test that half of one tenant's tokens go to its oldest request and half to its shortest, without starvation."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tandem.admission.tenant_queue import FlowKey, QueueItem, TenantQueue
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane

FLOW_KEY = FlowKey(Lane.STANDARD, TenantId("acme"))


def item(num_tokens: int, priority: int = 0) -> QueueItem:
    return QueueItem(flow_key=FLOW_KEY, num_tokens=num_tokens, priority=priority)


def queue_of(*sizes: int) -> TenantQueue:
    queue = TenantQueue(FLOW_KEY)
    for number, size in enumerate(sizes):
        queue.enter(RequestId(f"r{number}"), item(size), number)
    return queue


def pop_all(queue: TenantQueue) -> list[str]:
    order: list[str] = []
    while (first := queue.first()) is not None:
        queue.take(first)
        queue.check()
        order.append(first)
    return order


def test_the_shortest_goes_first_until_the_oldest_has_enough_credit() -> None:
    queue = queue_of(300, 100, 100, 100, 100)
    assert pop_all(queue) == ["r1", "r2", "r3", "r0", "r4"]


def test_requests_of_equal_length_go_in_order_of_arrival() -> None:
    assert pop_all(queue_of(*[50] * 6)) == [f"r{i}" for i in range(6)]


def test_a_more_urgent_priority_goes_before_a_shorter_request() -> None:
    queue = queue_of(10, 20)
    queue.enter(RequestId("urgent"), item(900, priority=-1), 2)
    assert pop_all(queue) == ["urgent", "r0", "r1"]


def test_a_returned_request_leaves_no_credit_behind() -> None:
    queue = queue_of(500, 100, 100)
    for _ in range(20):
        first = queue.first()
        assert first == "r1", "a refusal earned the oldest its turn"
        queue.restore_credit(queue.take(first))
        queue.enter(first, item(100), 1)
        queue.check()


def test_the_credit_of_a_returned_oldest_request_is_restored() -> None:
    queue = queue_of(200, 100, 100, 100)
    queue.take(RequestId("r1"))
    queue.take(RequestId("r2"))
    assert queue.first() == "r0"
    queue.restore_credit(queue.take(RequestId("r0")))
    queue.enter(RequestId("r0"), item(200), 0)
    assert queue.first() == "r0"


def test_entries_of_removed_requests_are_dropped() -> None:
    """The lists of a tenant that always has a waiting request are as long as the number of waiting requests."""
    queue = queue_of(10**6)
    for number in range(1, 5000):
        queue.enter(RequestId(f"r{number}"), item(1 + number % 7), number)
        if len(queue.waiting) > 5:
            first = queue.first()
            assert first is not None
            queue.take(first)
    assert len(queue._by_age) == len(queue._by_size) == len(queue.waiting)


@given(
    st.lists(st.integers(1, 400), max_size=12),
    st.integers(1, 400),
    st.lists(st.integers(1, 400), min_size=1, max_size=9),
)
def test_a_request_waits_no_longer_than_the_bound_whatever_arrives_later(
    older: list[int], own: int, later: list[int]
) -> None:
    queue, longest = queue_of(*older), max(*older, own, *later, 0)
    queue.enter(RequestId("mine"), item(own), len(older))
    num_sent = 0
    for number in range(len(older) + 1, 10_000):
        queue.enter(RequestId(f"r{number}"), item(later[number % len(later)]), number)
        first = queue.first()
        assert first is not None
        if first == "mine":
            break
        num_sent += queue.waiting[first].item.num_tokens
        queue.take(first)
        assert num_sent <= 2 * sum(older) + own + longest


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 5000))
@example([1] * 8 + [506, 511, 1024, 1024], 512)  # found at night: none of the shorter ones is ahead of an older one
def test_num_ahead_is_at_most_a_request_too_low_and_twice_too_high(sizes: list[int], own: int) -> None:
    queue, longest = queue_of(*sizes), max([*sizes, own])
    expected = queue.num_ahead(item(own))
    queue.enter(RequestId("mine"), item(own), len(sizes))
    size = own.bit_length()
    near = sum(tokens for tokens in sizes if tokens.bit_length() == size)
    num_sent = 0
    while (first := queue.first()) != "mine":
        assert first is not None
        num_sent += queue.waiting[first].item.num_tokens
        queue.take(first)
    assert num_sent <= expected + longest and expected <= 2 * (num_sent + near)
