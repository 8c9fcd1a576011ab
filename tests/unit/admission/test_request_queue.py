"""Test a gateway's request queue: waiting requests, charges, and the effect of cached prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.request_queue import ModelFlow, RequestQueue
from tandem.admission.tenant_queue import FlowKey
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tests.unit.admission.requests import request


def enter(queue: RequestQueue, one: Request) -> RequestId | None:
    leaves = queue.enter(one, queue.item_for(one, 1.0))
    queue.check()
    return leaves


def served(queue: RequestQueue, tenant: str = "a", model: str = "m") -> int:
    return dict(queue.served()).get(ModelFlow(model, FlowKey(Lane.INTERACTIVE, TenantId(tenant))), 0)


def test_each_model_has_a_queue_of_its_own() -> None:
    queue = RequestQueue(10)
    enter(queue, request("r1", model="one"))
    enter(queue, request("r2", model="two"))
    assert sorted(queue.models()) == ["one", "two"] and len(queue) == 2
    queue.send(RequestId("r1"))
    assert queue.models() == ["two"] and queue.first("one") is None and queue.first("none") is None


def test_a_request_is_charged_for_computed_and_sampled_tokens() -> None:
    queue = RequestQueue(10)
    enter(queue, request("r1"))
    queue.send(RequestId("r1"))
    queue.charge_output(RequestId("r1"), 3)
    queue.leave(RequestId("r1"), num_cached=60)
    assert served(queue) == 40 + 3
    queue.leave(RequestId("r1"))
    queue.charge_output(RequestId("r1"), 3)
    assert served(queue) == 43 and len(queue) == 0
    queue.check()


def test_a_tenant_with_cached_prompts_is_expected_to_compute_less() -> None:
    queue = RequestQueue(10)
    for i in range(60):
        enter(queue, request(f"r{i}"))
        queue.send(RequestId(f"r{i}"))
        queue.leave(RequestId(f"r{i}"), num_cached=90)
    assert served(queue) == 60 * 10
    assert queue.item_for(request("next"), 1.0).num_tokens == pytest.approx(10, abs=1)
    assert queue.item_for(request("next", "b"), 1.0).num_tokens == 100


def test_a_returned_request_waits_again_and_only_once() -> None:
    queue = RequestQueue(10)
    for name in ("r1", "r2"):
        enter(queue, request(name))
    queue.send(RequestId("r1"))
    queue.put_back(RequestId("r1"))
    queue.put_back(RequestId("r1"))
    queue.put_back(RequestId("unknown"))
    queue.check()
    assert len(queue) == 2 and queue.first("m") == "r1" and served(queue) == 0


def test_a_full_queue_drops_the_newest_request_of_the_fullest_tenant() -> None:
    queue = RequestQueue(3)
    for i in range(3):
        assert enter(queue, request(f"a{i}")) is None
    assert enter(queue, request("b0", "b")) == "a2"
    queue.leave(RequestId("a2"))
    assert enter(queue, request("a3")) == "a3"
    queue.leave(RequestId("a3"))
    queue.check()
    assert len(queue) == 3


def test_a_request_with_output_returns_before_those_not_begun() -> None:
    queue = RequestQueue(10)
    for name, num_tokens in (("begun", 900), ("fresh", 800), ("short", 5), ("other", 5)):
        enter(queue, request(name, "b" if name == "other" else "a", num_tokens))
    for name in ("begun", "fresh"):
        queue.send(RequestId(name), 700)
    queue.charge_output(RequestId("begun"), 3)
    for name in ("begun", "fresh"):
        queue.put_back(RequestId(name))
        queue.check()
    assert queue.charged(RequestId("begun")) == 900, "as much is to be computed as before"
    assert served(queue) == 3
    order: list[RequestId] = []
    while (first := queue.first("m")) is not None:
        queue.send(first, 100)
        order.append(first)
        queue.check()
    assert order == ["begun", "other", "short", "fresh"]
    assert served(queue) == 3 + 300, "and it is charged like any other"


# ---- KV time


def sent(queue: RequestQueue, one: Request, num_computed: int | None = None, weight: float = 1.0) -> RequestId:
    queue.enter(one, queue.item_for(one, weight))
    queue.send(one.id, num_computed)
    return one.id


def test_a_request_is_charged_with_the_larger_of_its_tokens_and_its_kv_time() -> None:
    queue = RequestQueue(10, kv_time_tokens=50)
    long = sent(queue, request("long"), 20)
    queue.charge_output(long, 10)
    queue.charge_kv_time(long, 500.0)
    assert served(queue) == 30, "500 token-seconds are 25 tokens"
    queue.charge_kv_time(long, 500.0)
    assert served(queue) == 50
    queue.charge_output(long, 15)
    assert served(queue) == 50, "45 tokens"
    queue.charge_output(long, 10)
    assert served(queue) == 55
    queue.leave(long, num_cached=90)
    assert served(queue) == 50, "10 computed and 35 sampled tokens are less than the KV time"
    queue.charge_kv_time(long, 500.0)
    assert served(queue) == 50 and len(queue) == 0
    queue.check()


def test_kv_time_of_one_request_does_not_pay_for_the_tokens_of_another() -> None:
    queue = RequestQueue(10, kv_time_tokens=1000)
    queue.charge_kv_time(sent(queue, request("cached"), 1), 300.0)
    sent(queue, request("computed"), 100)
    assert served(queue) == 400


def test_without_the_setting_kv_time_costs_nothing() -> None:
    queue = RequestQueue(10)
    queue.charge_kv_time(sent(queue, request("r1"), 20), 1e9)
    assert served(queue) == 20


def test_a_returned_request_keeps_the_charge_of_its_kv_time_and_its_output_alone() -> None:
    queue = RequestQueue(10, kv_time_tokens=1000)
    one = sent(queue, request("r1"))
    queue.charge_output(one, 3)
    queue.charge_kv_time(one, 40.0)
    assert served(queue) == 103
    queue.put_back(one)
    assert served(queue) == 40, "the prompt is computed again"
    queue.check()
    queue.send(one, 30)
    assert served(queue) == 40, "33 tokens are less than the KV time"
    queue.charge_kv_time(one, 10.0)
    assert served(queue) == 50
    queue.put_back(one)
    queue.leave(one)
    assert served(queue) == 50
    queue.check()


def test_a_tenant_whose_requests_hold_kv_for_long_waits_for_one_that_has_less() -> None:
    queue = RequestQueue(10, kv_time_tokens=10)
    for tenant, num_tokens in (("hog", 10), ("chat", 200)):
        for i in range(2):
            one = request(f"{tenant}{i}", tenant, num_tokens)
            queue.enter(one, queue.item_for(one, 1.0))
    assert queue.first("m") == "hog0"
    queue.send(RequestId("hog0"))
    assert queue.first("m") == "hog1", "by tokens it has had less"
    queue.charge_kv_time(RequestId("hog0"), 40_000.0)
    assert queue.first("m") == "chat0"


def test_kv_time_counts_by_weight_and_capacity_that_was_not_used_is_lost() -> None:
    queue = RequestQueue(10, kv_time_tokens=1000)
    double = sent(queue, request("d0", "double", 1), weight=2.0)
    single = sent(queue, request("s0", "single", 1))
    queue.charge_kv_time(double, 600.0)
    queue.charge_kv_time(single, 400.0)
    for tenant, weight in (("double", 2.0), ("single", 1.0), ("idle", 1.0)):
        one = request(f"{tenant}-next", tenant, 40)
        queue.enter(one, queue.item_for(one, weight))
    order = []
    while (first := queue.first("m")) is not None:
        queue.send(first)
        order.append(first)
    assert order == ["idle-next", "double-next", "single-next"]
    one = request("idle-again", "idle", 1)
    queue.enter(one, queue.item_for(one, 1.0))
    other = request("single-again", "single", 1)
    queue.enter(other, queue.item_for(other, 1.0))
    queue.send(RequestId("idle-again"))
    queue.charge_kv_time(RequestId("idle-again"), 60.0)
    one = request("idle-later", "idle", 1)
    queue.enter(one, queue.item_for(one, 1.0))
    assert queue.first("m") == "single-again", "the idle tenant did not save what it left to others"


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "output", "kv", "back", "leave"]), st.integers(0, 5), st.integers(0, 900)),
        max_size=80,
    )
)
def test_the_sum_of_the_charges_is_the_larger_resource_of_each_request(steps: list[tuple[str, int, int]]) -> None:
    """The charge of a request is a function of what it has used, in whatever order it used that."""
    queue = RequestQueue(100, kv_time_tokens=500)
    computed, output, kv, waiting = [0] * 6, [0] * 6, [0] * 6, [True] * 6
    ended: set[int] = set()
    names = [RequestId(f"r{i}") for i in range(6)]
    for name in names:
        enter(queue, request(name, num_tokens=1000))
    for verb, i, num in steps:
        if i in ended:
            continue
        if verb == "send" and waiting[i]:
            queue.send(names[i], num)
            computed[i], waiting[i] = num, False
        elif verb == "output" and not waiting[i]:
            queue.charge_output(names[i], num)
            output[i] += num
        elif verb == "kv":
            queue.charge_kv_time(names[i], float(2 * num))
            kv[i] += num
        elif verb == "back":
            queue.put_back(names[i])
            computed[i], waiting[i] = 0, True
        elif verb == "leave":
            if not waiting[i]:
                computed[i] = 1000 - num
            queue.leave(names[i], num_cached=num)
            ended.add(i)
        queue.check()
        due = [max(c + o, k) for c, o, k in zip(computed, output, kv, strict=True)]
        assert served(queue) == sum(due)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0, 3.0]),
)
def test_two_busy_tenants_are_charged_alike_up_to_what_workers_hold(
    of_a: list[tuple[int, int]], of_b: list[tuple[int, int]], num_places: int, weight: float
) -> None:
    """Each request holds one of few places, and its KV time is charged when it leaves it. The bound is that of
    `fair_queue`, with L the longest prompt and F the KV time of as many requests as there are places."""
    queue, num = RequestQueue(1000, kv_time_tokens=1000), 60
    weights = {"a": weight, "b": 1.0}
    kinds = {"a": of_a, "b": of_b}
    kv: dict[RequestId, int] = {}
    for i in range(num):
        for tenant in "ab":
            num_tokens, num_kv = kinds[tenant][i % len(kinds[tenant])]
            one = request(f"{tenant}{i}", tenant, num_tokens)
            kv[one.id] = num_kv
            queue.enter(one, queue.item_for(one, weights[tenant]))
    longest = max(num_tokens for num_tokens, _ in of_a + of_b)
    bound = longest + 2 * num_places * max(num_kv for _, num_kv in of_a + of_b)
    places: list[RequestId] = []
    for _ in range(num):  # so many that neither tenant ever has no request
        if len(places) == num_places:
            done = places.pop(0)
            queue.charge_kv_time(done, float(kv[done]))
            queue.leave(done)
        first = queue.first("m")
        assert first is not None
        queue.send(first)
        places.append(first)
        shares = [served(queue, tenant) / weights[tenant] for tenant in "ab"]
        assert abs(shares[0] - shares[1]) <= bound
