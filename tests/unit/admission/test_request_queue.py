"""Test a gateway's request queue: waiting requests, charges, and the effect of cached prefixes."""

from __future__ import annotations

import pytest

from tandem.admission.queue_item import FlowKey
from tandem.admission.request_queue import ModelFlow, RequestQueue
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams


def request(name: str, tenant: str = "a", num_tokens: int = 100, model: str = "m") -> Request:
    return Request(
        id=RequestId(name),
        model=model,
        prompt_tokens=(1,) * num_tokens,
        sampling=SamplingParams(max_tokens=4),
        tenant=TenantId(tenant),
    )


def enter(queue: RequestQueue, one: Request) -> RequestId | None:
    leaves = queue.enter(one, queue.item_for(one, 1.0))
    queue.check()
    return leaves


def served(queue: RequestQueue, tenant: str = "a", model: str = "m") -> int:
    return dict(queue.served())[ModelFlow(model, FlowKey(Lane.INTERACTIVE, TenantId(tenant)))]


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
