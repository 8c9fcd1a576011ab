"""The line of a gateway: what waits, what was charged, and what a tenant's prefixes save it."""

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


def enter(line: RequestQueue, one: Request) -> RequestId | None:
    leaves = line.enter(one, line.ticket(one, 1.0))
    line.check()
    return leaves


def served(line: RequestQueue, tenant: str = "a", model: str = "m") -> int:
    return dict(line.served())[ModelFlow(model, FlowKey(Lane.INTERACTIVE, TenantId(tenant)))]


def test_each_model_has_a_line_of_its_own() -> None:
    line = RequestQueue(10)
    enter(line, request("r1", model="one"))
    enter(line, request("r2", model="two"))
    assert sorted(line.models()) == ["one", "two"] and len(line) == 2
    line.send(RequestId("r1"))
    assert line.models() == ["two"] and line.first("one") is None and line.first("none") is None


def test_a_request_is_charged_for_what_was_computed_and_drawn() -> None:
    line = RequestQueue(10)
    enter(line, request("r1"))
    line.send(RequestId("r1"))
    line.charge_output(RequestId("r1"), 3)
    line.leave(RequestId("r1"), num_cached=60)
    assert served(line) == 40 + 3
    line.leave(RequestId("r1"))
    line.charge_output(RequestId("r1"), 3)
    assert served(line) == 43 and len(line) == 0
    line.check()


def test_a_tenant_whose_prompts_are_cached_is_expected_to_compute_less() -> None:
    line = RequestQueue(10)
    for i in range(60):
        enter(line, request(f"r{i}"))
        line.send(RequestId(f"r{i}"))
        line.leave(RequestId(f"r{i}"), num_cached=90)
    assert served(line) == 60 * 10
    assert line.ticket(request("next"), 1.0).num_tokens == pytest.approx(10, abs=1)
    assert line.ticket(request("next", "b"), 1.0).num_tokens == 100


def test_who_is_sent_back_waits_again_and_only_once() -> None:
    line = RequestQueue(10)
    for name in ("r1", "r2"):
        enter(line, request(name))
    line.send(RequestId("r1"))
    line.put_back(RequestId("r1"))
    line.put_back(RequestId("r1"))
    line.put_back(RequestId("unknown"))
    line.check()
    assert len(line) == 2 and line.first("m") == "r1" and served(line) == 0


def test_when_more_wait_than_may_the_one_with_most_loses_its_newest() -> None:
    line = RequestQueue(3)
    for i in range(3):
        assert enter(line, request(f"a{i}")) is None
    assert enter(line, request("b0", "b")) == "a2"
    line.leave(RequestId("a2"))
    assert enter(line, request("a3")) == "a3"
    line.leave(RequestId("a3"))
    line.check()
    assert len(line) == 3


def test_what_comes_back_in_the_middle_of_its_answer_goes_before_what_has_not_begun() -> None:
    line = RequestQueue(10)
    for name, num_tokens in (("begun", 900), ("fresh", 800), ("short", 5), ("other", 5)):
        enter(line, request(name, "b" if name == "other" else "a", num_tokens))
    for name in ("begun", "fresh"):
        line.send(RequestId(name), 700)
    line.charge_output(RequestId("begun"), 3)
    for name in ("begun", "fresh"):
        line.put_back(RequestId(name))
        line.check()
    assert line.charged(RequestId("begun")) == 900, "as much is to be computed as before"
    assert served(line) == 3
    order: list[RequestId] = []
    while (first := line.first("m")) is not None:
        line.send(first, 100)
        order.append(first)
        line.check()
    assert order == ["begun", "other", "short", "fresh"]
    assert served(line) == 3 + 300, "and it is charged like any other"
