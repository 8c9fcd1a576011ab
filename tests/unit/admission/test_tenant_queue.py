"""Half of one tenant's tokens go to its oldest request and half to its shortest, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.queue_item import FlowKey, QueueItem
from tandem.admission.tenant_queue import TenantQueue
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane

ACCOUNT = FlowKey(Lane.STANDARD, TenantId("acme"))


def ticket(num_tokens: int, priority: int = 0) -> QueueItem:
    return QueueItem(lane=ACCOUNT.lane, tenant=ACCOUNT.tenant, num_tokens=num_tokens, priority=priority)


def queue_of(*sizes: int) -> TenantQueue:
    queue = TenantQueue(ACCOUNT)
    for number, size in enumerate(sizes):
        queue.enter(RequestId(f"r{number}"), ticket(size), number)
    return queue


def drained(queue: TenantQueue) -> list[str]:
    order: list[str] = []
    while (first := queue.first()) is not None:
        queue.take(first)
        queue.check()
        order.append(first)
    return order


def test_the_shortest_go_first_until_the_oldest_has_earned_its_turn() -> None:
    queue = queue_of(300, 100, 100, 100, 100)
    assert drained(queue) == ["r1", "r2", "r3", "r0", "r4"]


def test_requests_of_equal_length_go_in_order_of_arrival() -> None:
    assert drained(queue_of(*[50] * 6)) == [f"r{i}" for i in range(6)]


def test_a_more_urgent_priority_goes_before_a_shorter_request() -> None:
    queue = queue_of(10, 20)
    queue.enter(RequestId("urgent"), ticket(900, priority=-1), 2)
    assert drained(queue) == ["urgent", "r0", "r1"]


def test_what_is_given_back_leaves_no_credit_behind() -> None:
    queue = queue_of(500, 100, 100)
    for _ in range(20):
        first = queue.first()
        assert first == "r1", "a refusal earned the oldest its turn"
        queue.give_back(queue.take(first))
        queue.enter(first, ticket(100), 1)
        queue.check()


def test_a_turn_of_the_oldest_that_is_given_back_is_not_spent() -> None:
    queue = queue_of(200, 100, 100, 100)
    queue.take(RequestId("r1"))
    queue.take(RequestId("r2"))
    assert queue.first() == "r0"
    queue.give_back(queue.take(RequestId("r0")))
    queue.enter(RequestId("r0"), ticket(200), 0)
    assert queue.first() == "r0"


def test_what_is_long_gone_takes_no_room() -> None:
    """A tenant that always has something to wait: heaps stay as long as what waits, and some."""
    queue = queue_of(10**6)
    for number in range(1, 5000):
        queue.enter(RequestId(f"r{number}"), ticket(1 + number % 7), number)
        if len(queue.waiting) > 5:
            first = queue.first()
            assert first is not None
            queue.take(first)
    assert len(queue._by_age) + len(queue._by_size) < 300


@given(
    st.lists(st.integers(1, 400), max_size=12),
    st.integers(1, 400),
    st.lists(st.integers(1, 400), min_size=1, max_size=9),
)
def test_a_request_waits_no_longer_than_the_bound_whatever_comes_later(
    older: list[int], own: int, later: list[int]
) -> None:
    queue, longest = queue_of(*older), max(*older, own, *later, 0)
    queue.enter(RequestId("mine"), ticket(own), len(older))
    num_sent = 0
    for number in range(len(older) + 1, 10_000):
        queue.enter(RequestId(f"r{number}"), ticket(later[number % len(later)]), number)
        first = queue.first()
        assert first is not None
        if first == "mine":
            break
        num_sent += queue.waiting[first].ticket.num_tokens
        queue.take(first)
        assert num_sent <= 2 * sum(older) + own + longest


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 5000))
def test_what_a_newcomer_expects_is_what_it_finds_up_to_one_request_and_its_own_size(
    sizes: list[int], own: int
) -> None:
    queue, longest = queue_of(*sizes), max([*sizes, own])
    expected = queue.num_ahead(ticket(own))
    queue.enter(RequestId("mine"), ticket(own), len(sizes))
    size = own.bit_length()
    near = sum(tokens for tokens in sizes if tokens.bit_length() == size)
    num_sent = 0
    while (first := queue.first()) != "mine":
        assert first is not None
        num_sent += queue.waiting[first].ticket.num_tokens
        queue.take(first)
    assert num_sent <= expected + longest and expected <= num_sent + 2 * near + longest
