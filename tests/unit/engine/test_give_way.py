"""Test which sequences of a draining worker with a full pool are requeued for the others, and when none is."""

from __future__ import annotations

import math

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, MigrationOffered
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, JobKey, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, PrefillJob
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.kv.block_pool import BlockPool
from tests.unit.engine.test_engine import engine, events, finish, request

CONSUMER = WorkerRef(WorkerId("consumer"), Incarnation(1), "consumer:1")


def generate(name: str, first: int) -> GenerateJob:
    return GenerateJob(request=request(name, range(first, first + 5), 18), attempt=1)


def until_stuck(e: Engine) -> list[Effect]:
    """Step until nothing can be planned; return the effects of that `begin`."""
    for _ in range(100):
        plan, effects = e.begin(1.0)
        e.check()
        if plan is None:
            return effects
        finish(e, plan, 50)
    raise AssertionError("it never stood still")


def drained(e: Engine) -> dict[JobKey, HandoffKey]:
    """Start a drain, and follow every offer."""
    offers = {event.key: event.offer for event in events(e.start_drain(1.0)) if isinstance(event, MigrationOffered)}
    for offer in offers.values():
        e.follow(offer, CONSUMER, 1.0)
    return offers


def test_the_youngest_is_given_back_and_the_others_go_on() -> None:
    e = engine(BlockPool(12, 2), 64)
    jobs = [generate(name, 100 * index) for index, name in enumerate("abc")]
    for job in jobs:
        e.submit(job, 1.0)
    finish(e, e.begin(1.0)[0], 50)
    offers = drained(e)
    (failed,) = [event for event in events(until_stuck(e)) if isinstance(event, Failed)]
    assert (failed.key, failed.kind) == (jobs[-1].key, ErrorKind.DRAINING)
    assert until_stuck(e) == [], "another one, though the blocks of the first are about to come back"
    e.release(offers[jobs[-1].key], 1.0)
    plan, _ = e.begin(1.0)
    assert plan is not None and len(plan.slices) == 2
    assert e.drained().num_requeued == 1


def test_nobody_is_given_back_where_a_prefill_is_about_to_be_taken() -> None:
    e = engine(BlockPool(14, 2), 64)
    offer = HandoffKey(HandoffId("h"), 1)
    e.submit(PrefillJob(request=request("p", range(300, 316), 9), attempt=1, handoff=offer.handoff), 1.0)
    finish(e, e.begin(1.0)[0], 50)
    e.follow(offer, CONSUMER, 1.0)
    e.submit(generate("a", 0), 1.0)
    finish(e, e.begin(1.0)[0], 50)
    drained(e)
    assert until_stuck(e) == []
    e.release(offer, 1.0)
    assert e.begin(1.0)[0] is not None and e.drained().num_requeued == 0


def test_it_need_not_look_each_time_once_all_that_runs_is_offered() -> None:
    e = engine(BlockPool(12, 2), 64)
    e.submit(generate("a", 0), 1.0)
    finish(e, e.begin(1.0)[0], 50)
    before = e.next_deadline()
    e.start_drain(1.0)
    assert before > -math.inf and e.next_deadline() > -math.inf
