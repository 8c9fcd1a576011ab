"""Test that lanes with workers of their own do not block each other in the queue, and that order holds in each lane."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tandem.admission.tenant import OPEN
from tandem.core.config import Disaggregation, GatewayConfig, Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.request import Request, SamplingParams
from tandem.core.request_stages import WaitCause
from tandem.core.slo import Slo
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration import request_queue
from tandem.orchestration.commands import FindConsumer
from tandem.orchestration.request_queue import REFUSAL_BACKOFF_S, PlacementQueue
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.router import place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import WorkerView
from tandem.sched.state.slo_targets import LatencyTargets
from tests.unit.orchestration.known_workers import BookedWorkers

BATCH, URGENT = frozenset({Lane.BATCH}), frozenset({Lane.INTERACTIVE, Lane.STANDARD})
FREE = WorkerLoad(num_blocks=1000, num_free_blocks=1000)
FULL = replace(FREE, lane_tokens=(500,) * 3, lane_longest=(500,) * 3, num_horizon_tokens=150)
"""Load of a worker that accepts prompts of fewer than 100 tokens."""


def worker(name: str, lanes: frozenset[Lane], load: WorkerLoad = FREE, pool: Pool = "mixed") -> WorkerView:
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    cost = StepCost(1e-3, 1e-3, 1e-4, 0.0, 0.0)
    return WorkerView(ref, pool, "m", "f", load, step_cost=cost, block_size=16, block_bytes=1 << 16, lanes=lanes)


class Queue:
    """A queue over workers that a test changes; every pair of them is linked."""

    def __init__(
        self, *views: WorkerView, targets: LatencyTargets | None = None, mode: Disaggregation = "prefer"
    ) -> None:
        workers = BookedWorkers(views)
        self.put = workers.add
        config = GatewayConfig(disaggregation=mode)
        self.queue = PlacementQueue(workers.candidates(), config, targets or LatencyTargets())

    def admit(self, name: str, lane: Lane, num_tokens: int = 400, now: float = 0.0) -> None:
        self.queue.admit(request(name, lane, num_tokens), now, OPEN)

    def waits(self, now: float) -> dict[str, list[tuple[WaitCause, float]]]:
        """Place all that can be placed, and return what each request waited for besides its turn."""
        return {turn.request: [wait[1:3] for wait in turn.waits] for turn in self.queue.turns(now)}

    def sent(self, now: float = 0.0) -> list[str]:
        """Place all that can be placed, and return each request with the worker that computes its prompt."""
        found = [f"{turn.request} {turn.placement.prefill.id}" for turn in self.queue.turns(now)]
        self.queue.queue.check()
        return found


def request(name: str, lane: Lane, num_tokens: int = 400) -> Request:
    return Request(
        id=RequestId(name), model="m", prompt_tokens=tuple(range(num_tokens)), lane=lane,
        sampling=SamplingParams(max_tokens=8),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("full", "free", "expected"), [("i", "b", ["b1 b", "b2 b"]), ("b", "i", ["i1 i", "i2 i"])]
)  # fmt: skip
def test_lanes_with_workers_of_their_own_do_not_block_each_other(full: str, free: str, expected: list[str]) -> None:
    lanes = {"i": URGENT, "b": BATCH}
    q = Queue(worker(full, lanes[full], FULL), worker(free, lanes[free]))
    for number in (1, 2):
        q.admit(f"b{number}", Lane.BATCH)
        q.admit(f"i{number}", Lane.INTERACTIVE)
    assert q.sent() == expected
    q.put(worker(full, lanes[full]))
    assert q.sent() == [f"{full}{number} {full}" for number in (1, 2)]


def test_a_lane_waits_for_a_more_urgent_one_at_shared_workers() -> None:
    """A short batch request would fit, and must not overtake the interactive one for ever."""
    q = Queue(worker("a", ALL_LANES, FULL), worker("b", ALL_LANES, FULL))
    q.admit("short", Lane.BATCH, 20)
    q.admit("long", Lane.INTERACTIVE)
    assert q.sent() == []
    assert "more urgent lane" in q.queue.why("m", Lane.BATCH, 0.0)
    q.put(worker("a", ALL_LANES))
    assert q.sent() == ["long a", "short a"]


def test_a_lane_uses_only_its_own_workers_while_a_more_urgent_one_waits_for_the_shared_ones() -> None:
    q = Queue(worker("a", ALL_LANES, FULL), worker("b", BATCH, replace(FULL, num_queued_tokens=500)))
    q.admit("long", Lane.INTERACTIVE)
    for name in ("s1", "s2"):
        q.admit(name, Lane.BATCH, 20)
    assert q.sent() == ["s1 b", "s2 b"]


def test_a_less_urgent_lane_blocks_no_other() -> None:
    q = Queue(worker("a", URGENT), worker("b", BATCH, FULL))
    q.admit("batch", Lane.BATCH)
    q.admit("standard", Lane.STANDARD)
    q.admit("interactive", Lane.INTERACTIVE)
    assert q.sent() == ["interactive a", "standard a"]


def test_order_holds_inside_a_lane() -> None:
    """A later request of the lane does not overtake a waiting one, although the worker would accept it."""
    q = Queue(worker("i", URGENT), worker("b", BATCH, FULL))
    q.admit("first", Lane.BATCH)
    assert q.sent() == []
    q.admit("second", Lane.BATCH, 400)
    assert q.sent() == []
    q.put(worker("b", BATCH))
    assert q.sent() == ["first b", "second b"]


def test_a_request_of_a_lane_without_workers_is_hopeless_and_blocks_nobody() -> None:
    q = Queue(worker("b", BATCH))
    q.admit("i", Lane.INTERACTIVE)
    q.admit("b", Lane.BATCH)
    assert q.sent(3.0) == ["b b"]
    assert q.queue.hopeless_since("m", Lane.INTERACTIVE) == 3.0 and q.queue.hopeless_since("m", Lane.BATCH) is None
    assert q.queue.why("m", Lane.INTERACTIVE, 3.0) == "no worker serves the lane interactive"
    assert q.queue.num_held() == {"m": 1}
    q.put(worker("i", URGENT))
    assert q.sent(5.0) == ["i i"] and q.queue.num_held() == {}
    assert q.queue.served_since("m", Lane.INTERACTIVE) == 5.0
    assert q.queue.hopeless_since("m", Lane.INTERACTIVE) is None


def test_without_any_worker_all_lanes_are_hopeless() -> None:
    q = Queue()
    for lane in Lane:
        q.admit(lane.label, lane)
    assert q.sent(1.0) == [] and q.queue.num_held() == {"m": 3}
    assert {q.queue.why("m", lane, 1.0) for lane in Lane} == {"no live worker serves the model"}


def test_only_a_report_of_a_worker_of_the_lane_wakes_it() -> None:
    urgent, batch = worker("i", URGENT), worker("b", BATCH, FULL)
    q = Queue(urgent, batch)
    q.admit("b", Lane.BATCH)
    assert q.sent() == []
    assert not q.queue.may_go_on(urgent) and not q.queue.may_go_on(batch)
    assert q.queue.may_go_on(worker("b", BATCH)) and q.queue.may_go_on(worker("a", ALL_LANES))
    q.admit("i", Lane.INTERACTIVE)
    assert q.sent() == ["i i"]
    q.put(worker("i", URGENT, FULL))
    q.admit("j", Lane.INTERACTIVE)
    assert q.sent() == []
    assert q.queue.may_go_on(urgent) and not q.queue.may_go_on(worker("i", URGENT, FULL))


def test_a_worker_that_refused_wakes_only_lanes_that_it_serves() -> None:
    urgent = worker("i", URGENT)
    q = Queue(urgent, worker("b", BATCH, FULL))
    q.queue.refused([urgent.ref], Lane.INTERACTIVE, 0.0)
    q.admit("b", Lane.BATCH)
    assert q.sent() == []
    q.admit("i", Lane.INTERACTIVE)
    assert q.sent() == [] and q.queue.may_go_on(urgent)
    assert q.sent() == ["i i"]


def test_a_refusal_rests_a_worker_only_for_the_lane_and_less_urgent_ones() -> None:
    """A more urgent request may find seats that others yield, or that a limit keeps from the lane."""
    shared = worker("a", ALL_LANES)
    q = Queue(shared)
    q.queue.refused([shared.ref], Lane.STANDARD, 0.0)
    for lane in (Lane.BATCH, Lane.STANDARD, Lane.INTERACTIVE):
        q.admit(lane.label, lane)
    assert q.sent(REFUSAL_BACKOFF_S / 2) == ["interactive a"]
    assert q.sent(REFUSAL_BACKOFF_S) == ["standard a", "batch a"]


def test_a_report_ends_a_refusal_also_when_no_request_of_the_workers_lanes_waits() -> None:
    urgent = worker("i", URGENT)
    q = Queue(urgent, worker("b", BATCH, FULL))
    q.queue.refused([urgent.ref], Lane.INTERACTIVE, 0.0)
    q.admit("b", Lane.BATCH)
    assert q.sent() == [] and not q.queue.may_go_on(urgent)
    q.admit("i", Lane.INTERACTIVE)
    assert q.sent(REFUSAL_BACKOFF_S / 2) == ["i i"]


@pytest.mark.parametrize("mode", ["prefer", "strict"])
def test_a_request_whose_decode_worker_has_just_refused_keeps_its_place_at_shared_workers(mode: Disaggregation) -> None:
    views = [worker("p", ALL_LANES, FREE, "prefill"), worker("di", URGENT, FREE, "decode")]
    q = Queue(*views, worker("db", BATCH, FREE, "decode"), mode=mode)
    q.queue.refused([views[1].ref], Lane.INTERACTIVE, 0.0)
    q.admit("i", Lane.INTERACTIVE)
    q.admit("b", Lane.BATCH)
    assert q.sent(REFUSAL_BACKOFF_S / 2) == []
    assert q.queue.hopeless_since("m", Lane.INTERACTIVE) is None and q.queue.num_held() == {}
    assert q.sent(REFUSAL_BACKOFF_S) == ["i p", "b p"]


def test_a_request_that_insists_on_a_pair_waits_while_a_worker_of_it_rests() -> None:
    q = Queue(prefill := worker("p", ALL_LANES, FREE, "prefill"), worker("d", ALL_LANES, FREE, "decode"))
    for at in (0.0, 1.0, 2.0):
        q.queue.breaker.failed([prefill.ref], at)
    q.queue.admit(request("a", Lane.INTERACTIVE), 2.0, replace(OPEN, disaggregation="strict"))
    assert q.sent(2.0) == []
    assert q.sent(3.0) == ["a p"]


def test_a_request_without_a_seat_goes_on_when_a_decode_worker_reports_one() -> None:
    full = replace(worker("d", ALL_LANES, replace(FREE, num_running=4), "decode"), max_num_seqs=4)
    q = Queue(worker("p", ALL_LANES, FREE, "prefill"), full)
    q.admit("a", Lane.INTERACTIVE)
    assert q.sent() == [] and "sequences" in q.queue.why("m", Lane.INTERACTIVE, 0.0)
    assert not q.queue.may_go_on(replace(full, load=replace(full.load, num_free_blocks=1001)))
    freed = replace(full, load=replace(full.load, num_running=3))
    assert q.queue.may_go_on(freed)
    q.put(freed)
    assert q.sent() == ["a p"]


def test_a_request_that_waits_is_searched_once_however_many_of_other_lanes_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_searches: Counter[Lane] = Counter()

    def counted(candidates: WorkerRanking, request: RoutingRequest, *rest: object) -> Placement | NoPlacement:
        num_searches[request.lane] += 1
        return place(candidates, request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(request_queue, "place", counted)
    q = Queue(worker("i", URGENT, FULL), worker("b", BATCH))
    q.admit("i", Lane.INTERACTIVE)
    for number in range(20):
        q.admit(f"b{number}", Lane.BATCH, 20)
    assert len(q.sent()) == 20
    assert num_searches == {Lane.INTERACTIVE: 1, Lane.BATCH: 20}


def test_a_request_without_usable_workers_stays_hopeless_while_a_more_urgent_one_waits() -> None:
    q = Queue(worker("p", ALL_LANES, FULL, "prefill"), worker("d", URGENT, FREE, "decode"), mode="strict")
    q.admit("b", Lane.BATCH)
    assert q.sent(1.0) == [] and q.queue.hopeless_since("m", Lane.BATCH) == 1.0
    q.admit("i", Lane.INTERACTIVE)
    assert q.sent(2.0) == [] and q.queue.hopeless_since("m", Lane.INTERACTIVE) is None
    assert q.queue.hopeless_since("m", Lane.BATCH) == 1.0 and q.queue.num_held() == {"m": 1}


def test_a_request_has_a_worker_from_the_moment_that_one_joins_although_a_more_urgent_one_waits() -> None:
    q = Queue(worker("i", URGENT, FULL))
    q.admit("b", Lane.BATCH)
    q.admit("i", Lane.INTERACTIVE)
    assert q.sent(1.0) == [] and q.queue.hopeless_since("m", Lane.BATCH) == 1.0
    q.put(worker("s", ALL_LANES, FULL))
    assert q.sent(2.0) == [] and q.queue.hopeless_since("m", Lane.BATCH) is None
    assert q.queue.served_since("m", Lane.BATCH) == 2.0


def test_a_shared_worker_wakes_a_lane_when_the_more_urgent_request_has_left() -> None:
    shared = worker("s", ALL_LANES)
    q = Queue(worker("s", ALL_LANES, FULL), worker("b", BATCH, FULL))
    q.admit("i", Lane.INTERACTIVE)
    q.admit("b", Lane.BATCH)
    assert q.sent() == []
    q.queue.leave(RequestId("i"))
    q.put(shared)
    assert q.queue.may_go_on(shared)
    assert q.sent() == ["b s"]


def test_a_sequence_is_taken_over_by_a_worker_of_its_lane() -> None:
    source = worker("s", ALL_LANES)
    q = Queue(worker("i", URGENT), worker("b", BATCH, replace(FREE, num_running=9)), source)
    found = {lane: q.queue.pick_consumer("m", lane, FindConsumer(0, source.ref), 0.0) for lane in Lane}
    assert {lane.label: ref.id for lane, ref in found.items() if ref is not None} == {
        "interactive": "i", "standard": "i", "batch": "b",
    }  # fmt: skip


TARGETS = LatencyTargets(interactive=Slo(ttft_s=1.0), batch=Slo(ttft_s=1.0))


@pytest.mark.parametrize(
    ("batch_lanes", "is_rejected"),
    [
        (BATCH, False),  # the two lanes compete for nothing
        (ALL_LANES, True),  # all interactive prompts precede it at both workers
    ],
)  # fmt: skip
def test_only_requests_that_compete_count_as_ahead(batch_lanes: frozenset[Lane], is_rejected: bool) -> None:
    lanes = URGENT if batch_lanes == BATCH else ALL_LANES
    q = Queue(worker("i", lanes, FULL), worker("b", batch_lanes, FULL), targets=LatencyTargets(batch=Slo(ttft_s=1.0)))
    for number in range(20):
        q.admit(f"i{number}", Lane.INTERACTIVE)
    assert q.sent() == []
    if is_rejected:
        with pytest.raises(TandemError) as missed:
            q.admit("b", Lane.BATCH, 100)
        assert missed.value.kind is ErrorKind.SLO_MISS
    else:
        q.admit("b", Lane.BATCH, 100)


def test_a_prompt_is_expected_no_later_than_workers_without_more_urgent_lanes_compute_it() -> None:
    targets = LatencyTargets(batch=Slo(ttft_s=1.0))
    q = Queue(worker("a", ALL_LANES, FULL), worker("b", BATCH, FREE), targets=targets)
    waiting = Queue(worker("a", ALL_LANES, FULL), worker("b", ALL_LANES, FULL), targets=targets)
    for each in (q, waiting):
        for number in range(20):
            each.admit(f"i{number}", Lane.INTERACTIVE)
        assert each.sent() == []
    q.admit("b", Lane.BATCH, 100)
    with pytest.raises(TandemError):
        waiting.admit("b", Lane.BATCH, 100)


def test_workers_of_other_lanes_do_not_shorten_a_prediction() -> None:
    """The idle batch worker must not make the interactive target look attainable."""
    busy = replace(FULL, lane_tokens=(5000,) * 3, num_queued_tokens=5000)
    q = Queue(worker("i", URGENT, busy), worker("b", BATCH), targets=TARGETS)
    with pytest.raises(TandemError) as missed:
        q.admit("i", Lane.INTERACTIVE, 100)
    assert missed.value.kind is ErrorKind.SLO_MISS
    q.admit("b", Lane.BATCH, 100)
    shared = Queue(worker("i", URGENT, busy), worker("b", ALL_LANES), targets=TARGETS)
    shared.admit("i", Lane.INTERACTIVE, 100)


def test_only_the_first_of_a_lane_waits_for_room() -> None:
    q = Queue(worker("a", ALL_LANES, FULL))
    q.admit("first", Lane.INTERACTIVE, now=1.0)
    assert q.waits(1.0) == {}
    q.admit("second", Lane.INTERACTIVE, now=2.0)
    assert q.waits(2.0) == q.waits(3.5) == {}
    q.queue.leave(RequestId("first"))
    assert q.waits(4.0) == {}
    q.put(worker("a", ALL_LANES))
    assert q.waits(6.0) == {"second": [(WaitCause.NO_ROOM, 2.0)]}, "before that it waited for its turn"
    q.admit("third", Lane.INTERACTIVE, now=7.0)
    assert q.waits(7.0) == {"third": []}


def test_all_of_a_lane_wait_for_more_urgent_ones_and_for_a_first_worker() -> None:
    q = Queue(worker("a", ALL_LANES, FULL))
    q.admit("i", Lane.INTERACTIVE, now=0.0)
    q.admit("b1", Lane.BATCH, 20, now=0.0)
    assert q.waits(0.0) == {}
    q.admit("b2", Lane.BATCH, 20, now=1.0)
    assert q.waits(1.0) == {}
    q.put(worker("a", frozenset({Lane.INTERACTIVE}), FULL))
    assert q.waits(3.0) == {}, "now no worker serves the lane"
    q.put(worker("a", ALL_LANES))
    urgent, none = WaitCause.URGENT_LANES, WaitCause.NO_WORKER
    assert q.waits(8.0) == {
        "i": [(WaitCause.NO_ROOM, 8.0)],
        "b1": [(none, 5.0), (urgent, 3.0)],
        "b2": [(none, 5.0), (urgent, 2.0)],
    }


def test_a_request_that_is_put_back_begins_to_wait_again() -> None:
    q = Queue(worker("a", ALL_LANES))
    q.admit("r", Lane.BATCH, now=0.0)
    assert q.waits(0.0) == {"r": []}
    q.put(worker("a", ALL_LANES, FULL))
    q.queue.put_back(RequestId("r"), 5.0)
    assert q.waits(5.0) == q.waits(6.0) == {}
    q.queue.put_back(RequestId("r"), 6.5)
    q.put(worker("a", ALL_LANES))
    assert q.waits(7.0) == {"r": [(WaitCause.NO_ROOM, 2.0)]}
    q.queue.leave(RequestId("r"))
    assert not q.queue.waits.requests()
