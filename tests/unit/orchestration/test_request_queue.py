"""Test the placement of queued requests by the prefixes that workers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tandem.admission.tenant import OPEN
from tandem.core.config import Disaggregation, GatewayConfig, Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockHash, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import FindConsumer, Requeue
from tandem.orchestration.request_queue import (
    ALONE_S,
    LONGEST_PAUSE_S,
    NUM_REFUSALS,
    REFUSAL_BACKOFF_S,
    Dispatchable,
    PlacementQueue,
)
from tandem.routing.circuit_breaker import FIRST_BACKOFF_S, LONGEST_BACKOFF_S
from tandem.routing.prefix_accuracy import Prediction
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.worker_view import WorkerView
from tests.unit.routing.rankings import ranking_of

SLOW = StepCost(1e-3, 1e-3, 1e-4, 0.0, 0.0)
HASHES = [BlockHash(bytes([i]) * 16) for i in range(20)]


class FixedPrefixes:
    """Return the prefix hits that a test sets."""

    def __init__(self) -> None:
        self.hits: dict[WorkerRef, PrefixHit] = {}
        self.num_looks = 0

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        self.num_looks += 1
        return {ref: hit for ref, hit in self.hits.items() if hit.num_blocks <= len(hashes)} if hashes else {}

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        raise AssertionError("a queue reports nothing")


def hit_blocks(turn: Dispatchable) -> int:
    """Return the number of prompt blocks that the computing worker is predicted to hold."""
    held = [one for one in turn.predicted if one.worker == turn.placement.prefill]
    return held[0].num_tokens // held[0].block_size if held else 0


def worker(name: str, pool: Pool) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    load = WorkerLoad(num_blocks=1000, num_free_blocks=1000)
    return WorkerView(ref, pool, "m", "f", load, step_cost=SLOW, block_size=16, block_bytes=1 << 16)


P1, P2, D1 = worker("p1", "prefill"), worker("p2", "prefill"), worker("d1", "decode")


class Rig:
    """A queue over workers of which each prefill worker is linked to the last one."""

    def __init__(self, *views: WorkerView) -> None:
        linked = {(view.ref, views[-1].ref) for view in views if view.pool == "prefill"}
        self.held = FixedPrefixes()
        self.waiting = PlacementQueue(ranking_of(views, linked), GatewayConfig(), prefixes=self.held)

    def next(self) -> Dispatchable:
        return next(self.waiting.turns(0.0))


def request(name: str = "r", **rest: object) -> Request:
    fields = {"prompt_tokens": tuple(range(320)), "sampling": SamplingParams(max_tokens=8), **rest}
    return Request(id=RequestId(name), model="m", **fields)  # type: ignore[arg-type]


def test_hits_are_looked_up_when_a_request_is_placed_and_its_charge_is_what_is_left() -> None:
    rig = Rig(P1, P2, D1)
    rig.waiting.admit(request(), 0.0, hashes=HASHES)
    assert rig.held.num_looks == 0 and rig.waiting.queue.charged(RequestId("r")) == 320
    rig.held.hits = {P2.ref: PrefixHit(19, 19)}
    turn = rig.next()
    assert (turn.placement.prefill, hit_blocks(turn)) == (P2.ref, 19)
    assert rig.waiting.queue.charged(RequestId("r")) == 320 - 19 * 16
    rig.waiting.queue.check()


def test_a_returned_request_is_charged_in_full_and_looked_up_again() -> None:
    rig = Rig(P1, P2, D1)
    rig.held.hits = {P2.ref: PrefixHit(19, 19)}
    rig.waiting.admit(request(), 0.0, hashes=HASHES)
    rig.next()
    served = dict(rig.waiting.queue.served())
    rig.waiting.refused([P2.ref], Lane.INTERACTIVE, 0.0)
    rig.waiting.queue.put_back(RequestId("r"))
    assert rig.waiting.queue.charged(RequestId("r")) == 320
    turn = rig.next()
    assert (turn.placement.prefill, hit_blocks(turn)) == (P1.ref, 0)
    (before,), (after,) = served.values(), dict(rig.waiting.queue.served()).values()
    assert (before, after) == (16, 320), "the first charge was taken back"
    rig.waiting.leave(RequestId("r"), 0)
    rig.waiting.queue.check()


def test_a_prompt_with_logprobs_uses_no_hits() -> None:
    rig = Rig(P1, D1)
    rig.held.hits = {P1.ref: PrefixHit(19, 19)}
    rig.waiting.admit(request(prompt_logprobs=1), 0.0, hashes=HASHES)
    assert hit_blocks(rig.next()) == 0 and rig.waiting.queue.charged(RequestId("r")) == 320


def test_without_hashes_the_estimate_is_the_tenants_history() -> None:
    rig = Rig(P1, D1)
    for i in range(30):
        rig.waiting.admit(request(f"r{i}"), 0.0)
        rig.next()
        rig.waiting.leave(RequestId(f"r{i}"), 304)
    rig.waiting.admit(request("last"), 0.0)
    assert rig.held.num_looks == 0 and rig.waiting.queue.charged(RequestId("last")) < 100


def test_a_deadline_that_only_a_prefix_makes_possible_is_accepted() -> None:
    rig = Rig(P1, D1)
    with pytest.raises(TandemError) as missed:
        rig.waiting.admit(request(), 0.0, timeout_s=0.1, hashes=HASHES)
    assert missed.value.kind is ErrorKind.SLO_MISS
    rig.held.hits = {P1.ref: PrefixHit(19, 19)}
    assert rig.waiting.admit(request(), 0.0, timeout_s=0.1, hashes=HASHES).leaves is None


@pytest.mark.parametrize(
    ("mode", "busy", "is_rejected"),
    [
        ("prefer", P1, True), ("strict", P1, True),
        ("off", P1, False), ("auto", P1, False),  # it may run on the decode worker alone
        ("prefer", worker("m1", "mixed"), False),  # there is no prefill worker
    ],
)  # fmt: skip
def test_the_first_token_is_expected_of_the_workers_that_may_compute_the_prompt(
    mode: Disaggregation, busy: WorkerView, is_rejected: bool
) -> None:
    rig, tenant = (
        Rig(replace(busy, load=replace(busy.load, num_queued_tokens=5000)), D1),
        replace(OPEN, disaggregation=mode),
    )
    if is_rejected:
        with pytest.raises(TandemError) as missed:
            rig.waiting.admit(request(), 0.0, tenant, timeout_s=1.0)
        assert missed.value.kind is ErrorKind.SLO_MISS
    else:
        rig.waiting.admit(request(), 0.0, tenant, timeout_s=1.0)
        assert rig.next().placement.prefill == D1.ref


def test_a_worker_that_would_reject_the_prompt_accepts_the_uncached_part() -> None:
    load = replace(P1.load, lane_tokens=(500,) * 3, lane_longest=(400,) * 3, num_horizon_tokens=150)
    full = replace(P1, load=load)
    rig = Rig(full, D1)
    rig.waiting.admit(request(), 0.0, hashes=HASHES)
    assert not list(rig.waiting.turns(0.0))
    assert not rig.waiting.may_go_on(full)
    rig.held.hits = {P1.ref: PrefixHit(18, 18)}
    assert hit_blocks(rig.next()) == 18


def test_a_remote_prefix_is_not_charged_and_widens_the_choice() -> None:
    full = replace(P1.load, lane_tokens=(500,) * 3, lane_longest=(400,) * 3, num_horizon_tokens=150)
    rig = Rig(replace(P1, load=full), D1)
    rig.waiting.admit(request(), 0.0, hashes=HASHES)
    assert not list(rig.waiting.turns(0.0))
    rig.held.hits = {D1.ref: PrefixHit(18, 18)}
    turn = rig.next()
    assert hit_blocks(turn) == 0 and turn.placement.prefix is not None
    assert (turn.placement.prefix.producer, turn.placement.prefix.num_blocks) == (D1.ref, 18)
    assert rig.waiting.queue.charged(RequestId("r")) == 320 - 18 * 16


def test_a_failing_link_is_not_used_for_prefix_fetches_until_retried() -> None:
    rig = Rig(P1, D1)
    rig.held.hits = {D1.ref: PrefixHit(18, 18)}
    used_remote_prefix = []
    for name, now in (("a", 0.0), ("b", 0.0), ("c", 0.0), ("d", FIRST_BACKOFF_S)):
        rig.waiting.admit(request(name), 0.0, hashes=HASHES)
        turn = next(rig.waiting.turns(now))
        used_remote_prefix.append(turn.placement.prefix is not None)
        if turn.placement.prefix is not None:
            rig.waiting.on_prefix_fetch((D1.ref, P1.ref), has_succeeded=False, now=now)
    assert used_remote_prefix == [True, True, False, True]
    rig.waiting.admit(request("e"), 0.0, hashes=HASHES)
    rig.waiting.forget(D1.ref)
    assert next(rig.waiting.turns(FIRST_BACKOFF_S)).placement.prefix is not None, "its failures went with the worker"


def test_a_worker_with_capacity_for_the_rest_wakes_the_queue() -> None:
    full = replace(P1.load, lane_tokens=(500,) * 3, lane_longest=(100,) * 3, num_horizon_tokens=150)
    rig = Rig(replace(P1, load=full), D1)
    rig.held.hits = {D1.ref: PrefixHit(18, 18)}
    rig.waiting.admit(request(), 0.0, hashes=HASHES)
    assert not list(rig.waiting.turns(0.0))
    less = replace(P1, load=replace(full, lane_tokens=(210,) * 3))
    assert rig.waiting.may_go_on(less)
    assert not rig.waiting.may_go_on(replace(P1, load=replace(full, lane_tokens=(260,) * 3)))


def test_only_the_first_request_is_tried() -> None:
    full = replace(P1.load, lane_tokens=(500,) * 3, lane_longest=(0,) * 3, num_horizon_tokens=150)
    rig = Rig(replace(P1, load=full), D1)
    for i in range(50):
        rig.waiting.admit(request(f"r{i}"), 0.0, hashes=HASHES)
    assert not list(rig.waiting.turns(0.0)) and rig.held.num_looks == 1


def test_a_consumer_is_found_without_queueing_and_charge() -> None:
    second = worker("d2", "decode")
    rig = Rig(P1, second, D1)
    rig.waiting.admit(request(), 0.0, hashes=HASHES)
    rig.next()
    seek = FindConsumer(0, P1.ref, unfit=frozenset({D1.ref}))
    assert rig.waiting.pick_consumer("m", Lane.INTERACTIVE, seek, 0.0) == second.ref
    rig.waiting.queue.check()


def open_breakers(rig: Rig, *refs: WorkerRef) -> float:
    """Open the breakers of these workers."""
    now, breaker = 0.0, rig.waiting.breaker
    while not breaker.excluded(now + LONGEST_BACKOFF_S - 1.0):
        now += LONGEST_BACKOFF_S
        breaker.on_attempt(refs, now)
        breaker.failed(refs, now)
    return now


def test_a_request_goes_elsewhere_while_its_best_worker_fails() -> None:
    rig = Rig(P1, P2, D1)
    now = open_breakers(rig, P1.ref)
    rig.waiting.admit(request(), 0.0)
    turn = next(rig.waiting.turns(now))
    assert turn.placement.prefill == P2.ref


def test_without_healthy_prefill_workers_a_request_is_local() -> None:
    """The request is placed as if there were no prefill workers, without waiting for a back-off."""
    rig = Rig(P1, P2, D1)
    now = open_breakers(rig, P1.ref, P2.ref)
    rig.waiting.admit(request(), 0.0)
    turn = next(rig.waiting.turns(now))
    assert turn.placement.path == "fallback;reason=no_prefill_worker"
    assert turn.placement.decode == D1.ref


def test_failing_workers_are_tried_one_request_at_a_time_without_others() -> None:
    rig = Rig(P1, D1)
    now = open_breakers(rig, P1.ref, D1.ref)
    for i in range(4):
        rig.waiting.admit(request(f"r{i}"), 0.0)
    assert not list(rig.waiting.turns(now)), "they failed just now"
    for i in range(3):
        now += FIRST_BACKOFF_S
        turn = next(rig.waiting.turns(now))
        assert turn.request == f"r{i}"
        assert not list(rig.waiting.turns(now)) and rig.waiting.hopeless_since("m", Lane.INTERACTIVE) == now


def test_failing_workers_are_not_tried_while_others_are_full() -> None:
    second = worker("d2", "decode")
    rig = Rig(P1, second, D1)
    now = open_breakers(rig, second.ref) + FIRST_BACKOFF_S
    rig.waiting.refused([D1.ref], Lane.INTERACTIVE, now)
    rig.waiting.admit(request(), 0.0)
    assert not list(rig.waiting.turns(now))
    turn = next(rig.waiting.turns(now + REFUSAL_BACKOFF_S))
    assert turn.placement.decode == D1.ref


def test_a_migration_prefers_a_failing_worker_to_none() -> None:
    second = worker("d2", "decode")
    rig = Rig(P1, second, D1)
    now = open_breakers(rig, D1.ref) + FIRST_BACKOFF_S
    assert rig.waiting.pick_consumer("m", Lane.INTERACTIVE, FindConsumer(0, second.ref), now) == D1.ref
    assert rig.waiting.pick_consumer("m", Lane.INTERACTIVE, FindConsumer(0, second.ref), now) is None, (
        "until something is heard of that"
    )
    assert rig.waiting.pick_consumer("m", Lane.INTERACTIVE, FindConsumer(0, P1.ref), now) == second.ref


@pytest.mark.parametrize(("mode", "path"), [("prefer", "fallback;reason=kv_lost"), ("strict", "remote")])
def test_a_request_with_lost_kv_is_computed_on_one_worker_where_allowed(mode: Disaggregation, path: str) -> None:
    rig = Rig(P1, D1)
    rig.waiting.admit(request(), 0.0, replace(OPEN, disaggregation=mode))
    rig.next()
    rig.waiting.failed(RequestId("r"), Requeue(frozenset(), has_failed=True, is_undivided=True))
    rig.waiting.queue.put_back(RequestId("r"))
    assert rig.next().placement.path == path


class RefusedRig(Rig):
    """Two requests of two lanes, each of which was sent `NUM_REFUSALS` times and refused. `now`: their pauses are
    over."""

    FIRST, SECOND = RequestId("first"), RequestId("second")

    def __init__(self) -> None:
        super().__init__(P1, P2, D1)
        for name, lane in ((self.FIRST, Lane.INTERACTIVE), (self.SECOND, Lane.BATCH)):
            self.waiting.admit(request(name, lane=lane), 0.0)
        for _ in range(NUM_REFUSALS):
            for turn in list(self.waiting.turns(0.0)):
                self.waiting.count_refusal(turn.request, 0.0)
                self.waiting.put_back(turn.request, 0.0)
        self.now = LONGEST_PAUSE_S

    def sent(self, now: float | None = None) -> list[RequestId]:
        return [turn.request for turn in self.waiting.turns(self.now if now is None else now)]


def test_requests_that_are_refused_again_and_again_pause_and_are_sent_one_at_a_time() -> None:
    rig = RefusedRig()
    assert rig.sent(0.0) == []
    assert "keep refusing it" in rig.waiting.why("m", Lane.INTERACTIVE, 0.0)
    assert rig.sent() == [rig.FIRST]
    assert rig.waiting.accepted(rig.FIRST), "another one may be sent now"
    assert rig.sent() == [rig.SECOND]
    assert rig.waiting.accepted(rig.SECOND) and not rig.waiting.accepted(rig.SECOND)
    rig.waiting.check()


def test_a_request_that_is_sent_alone_keeps_others_waiting_for_a_bounded_time() -> None:
    rig = RefusedRig()
    assert rig.sent() == [rig.FIRST] and rig.sent() == []
    assert rig.sent(rig.now + ALONE_S) == [rig.SECOND]


def test_the_next_one_is_sent_when_the_one_before_it_ends() -> None:
    rig = RefusedRig()
    assert rig.sent() == [rig.FIRST]
    rig.waiting.leave(rig.FIRST)
    assert rig.sent() == [rig.SECOND]
    rig.waiting.check()


def test_one_that_is_refused_again_pauses_again_and_stays_before_less_urgent_ones() -> None:
    rig = RefusedRig()
    assert rig.sent() == [rig.FIRST]
    rig.waiting.count_refusal(rig.FIRST, rig.now)
    rig.waiting.put_back(rig.FIRST, rig.now)
    assert rig.sent() == []
    assert rig.sent(rig.now + LONGEST_PAUSE_S) == [rig.FIRST]


def test_other_requests_do_not_wait_for_one_that_is_sent_alone() -> None:
    rig = RefusedRig()
    assert rig.sent() == [rig.FIRST]
    rig.waiting.admit(request("new"), rig.now)
    assert rig.sent() == [RequestId("new")]
    rig.waiting.failed(rig.SECOND, Requeue(frozenset(), has_failed=True))
    assert rig.sent() == [rig.SECOND], "a failure in between ends the row of refusals"
