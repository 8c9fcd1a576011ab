"""Test the router's choices over small views."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Disaggregation, Pool
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.worker_load import WorkerLoad
from tandem.routing.candidates import NUM_BY_LOAD, PrefillCandidate
from tandem.routing.cost import price
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.picker import margin_s
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.router import BUSY, Routing, place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import WorkerView, decode_cost, local_cost, prefill_cost
from tests.effort import effort
from tests.unit.routing.rankings import ranking_of


def ref(name: str) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")


def worker(name: str, pool: Pool, *, queued: int = 0, running: int = 0, build: str = "f", **load: bool) -> WorkerView:
    return WorkerView(ref(name), pool, "m", build, WorkerLoad(num_queued_tokens=queued, num_running=running, **load))


def view(*workers: WorkerView, linked: str = "", unlinked: str = "") -> WorkerRanking:
    def pairs(text: str) -> frozenset[tuple[WorkerRef, WorkerRef]]:
        return frozenset((ref(a), ref(b)) for a, b in (pair.split("-") for pair in text.split()))

    return ranking_of(workers, pairs(linked), pairs(unlinked))


def chosen(outcome: Placement | NoPlacement) -> str:
    if isinstance(outcome, Placement):
        return f"{outcome.prefill.id}-{outcome.decode.id} {outcome.path}"
    return f"none: {outcome.reason}, may pass: {outcome.may_pass}"


P1, P2 = worker("p1", "prefill"), worker("p2", "prefill")
D1, D2 = worker("d1", "decode"), worker("d2", "decode")
M1, M2 = worker("m1", "mixed"), worker("m2", "mixed")


@pytest.mark.parametrize(
    ("cluster", "policy", "expected"),
    [
        (view(), "prefer", "none: no live worker serves the model, may pass: False"),
        (view(P1, D1, linked="p1-d1"), "prefer", "p1-d1 remote"),
        (view(P1, D1, linked="p1-d1"), "off", "d1-d1 local"),
        (view(P1, D1), "prefer", "none: no link between the workers, may pass: True"),
        (view(P1, D1, unlinked="p1-d1"), "prefer", "d1-d1 fallback;reason=no_link_between_the_workers"),
        (view(P1, D1, unlinked="p1-d1"), "strict", "none: no link between the workers, may pass: False"),
        (view(D1), "prefer", "d1-d1 fallback;reason=no_prefill_worker"),
        (view(P1), "prefer", "p1-p1 fallback;reason=no_decode_worker"),
        (view(M1, D1, linked="m1-d1"), "prefer", "d1-d1 fallback;reason=no_prefill_worker"),
        (view(D1), "strict", "none: no prefill worker, may pass: False"),
        (view(M1, M2, linked="m1-m2"), "prefer", "m1-m1 local"),
        (view(M1, M2, linked="m1-m2"), "strict", "m1-m2 remote"),
        (view(P1, M1, linked="p1-m1"), "prefer", "p1-m1 remote"),
        (view(worker("p1", "prefill", build="g"), D1), "prefer",
         "d1-d1 fallback;reason=no_worker_of_the_same_model_build"),
        (view(worker("p1", "prefill", draining=True), D1), "prefer", "d1-d1 fallback;reason=no_prefill_worker"),
        (view(worker("p1", "prefill", queued=9), P2, D1, linked="p1-d1 p2-d1"), "prefer", "p2-d1 remote"),
        (view(P1, worker("d1", "decode", running=3), D2, linked="p1-d1 p1-d2"), "prefer", "p1-d2 remote"),
        (view(P2, P1, D2, D1, linked="p1-d1 p1-d2 p2-d1 p2-d2"), "prefer", "p1-d1 remote"),
        (view(P1, P2, D1, linked="p2-d1"), "prefer", "p2-d1 remote"),
    ],
)  # fmt: skip
def test_placement(cluster: WorkerRanking, policy: str, expected: str) -> None:
    assert chosen(place(cluster, RoutingRequest("m", mode=policy))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cluster", "mode", "expected"),
    [
        (view(P1, M1, M2, unlinked="p1-m1 p1-m2"), "prefer", "m1-m1 fallback;reason=no_link_between_the_workers"),
        (view(P1, M1, M2, unlinked="p1-m1"), "prefer", "none: no link between the workers, may pass: True"),
        (view(M1, M2), "strict", "none: no prefill worker, may pass: False"),
    ],
)
def test_a_pair_of_mixed_workers_that_is_never_tested_is_not_waited_for(
    cluster: WorkerRanking, mode: Disaggregation, expected: str
) -> None:
    assert chosen(place(cluster, RoutingRequest("m", mode=mode), routing=Routing(mixed_pairs=False))) == expected


def test_an_excluded_worker_is_waited_for_before_falling_back() -> None:
    outcome = place(view(P1, D1, linked="p1-d1"), RoutingRequest("m"), frozenset({ref("d1")}))
    assert isinstance(outcome, NoPlacement)


def test_a_pair_with_a_failing_worker_is_not_waited_for() -> None:
    cluster = view(P1, P2, D1, D2, linked="p1-d1", unlinked="p2-d1 p1-d2 p2-d2").without(frozenset({ref("p1")}))
    outcome = place(cluster, RoutingRequest("m"), frozenset({ref("d1")}))
    assert chosen(outcome) == "d2-d2 fallback;reason=no_link_between_the_workers"


def test_unreported_work_counts_as_queued() -> None:
    busy = WorkerView(ref("m1"), "mixed", "m", "f", WorkerLoad(), unreported=(100,))
    assert chosen(place(view(busy, M2), RoutingRequest("m", mode="off"))) == "m2-m2 local"


def test_another_model_is_not_served() -> None:
    assert isinstance(place(view(M1), RoutingRequest("other", mode="off")), NoPlacement)


@given(st.data())
def test_the_cheapest_linked_pair_is_chosen(data: st.DataObject) -> None:
    """All pairs are priced here; the chosen one costs as little as predictions can distinguish, unless there are more
    workers than are compared for one request."""
    numbers, pools = st.integers(0, 3), st.sampled_from(["prefill", "decode", "mixed"])
    workers = [
        worker(
            f"w{i}",
            data.draw(pools),
            queued=data.draw(numbers),
            running=data.draw(numbers),
            build=data.draw(st.sampled_from(["f", "f", "f", "g"])),
        )
        for i in range(data.draw(st.integers(1, NUM_BY_LOAD + 1)))
    ]
    every = [(p, d) for p in workers for d in workers if p.prefills and d.decodes and p is not d]
    linked = [pair for pair in every if data.draw(st.booleans())]
    cluster = ranking_of(workers, frozenset((p.ref, d.ref) for p, d in linked))
    outcome = place(cluster, RoutingRequest("m", mode="strict"))
    fit = [(p, d) for p, d in linked if p.fingerprint == d.fingerprint]
    if not fit:
        assert isinstance(outcome, NoPlacement)
        return
    assert isinstance(outcome, Placement)
    priced = price([PrefillCandidate(p, (d,)) for p, d in fit], RoutingRequest("m"), LinkBandwidth())
    least_s = min(offer.total_s for offer in priced)
    best = next(offer for offer in priced if offer.total_s == least_s)
    assert outcome.picked is not None and outcome.picked.cost in priced
    if max(sum(w.prefills for w in workers), sum(w.decodes for w in workers)) <= NUM_BY_LOAD:
        assert outcome.picked.cost.total_s <= least_s + margin_s(best)


def test_of_many_linked_prefill_workers_only_the_least_loaded_are_compared() -> None:
    """The busy one is not compared, although it alone may hand over to the idle decode worker."""
    free = [worker(f"p{i}", "prefill") for i in range(NUM_BY_LOAD)]
    busy, full = worker("p9", "prefill", queued=1), worker("d1", "decode", running=3)
    linked = "p9-d2 " + " ".join(f"p{i}-d1" for i in range(NUM_BY_LOAD))
    outcome = place(view(*free, busy, full, D2, linked=linked), RoutingRequest("m"))
    assert isinstance(outcome, Placement) and outcome.decode == full.ref
    outcome = place(view(*free[1:], busy, full, D2, linked=linked), RoutingRequest("m"))
    assert chosen(outcome) == "p9-d2 remote", "it is one of few"


class RankedWorkers:
    """Workers whose views change, and a ranking of them that is updated as its contract demands."""

    def __init__(self, views: list[WorkerView], linked: frozenset[tuple[WorkerRef, WorkerRef]]) -> None:
        self.views = {worker_view.ref: worker_view for worker_view in views}
        self.linked = linked
        self.ranking = WorkerRanking(linked, frozenset())
        for worker_view in views:
            self.ranking.put(partial(self.views.__getitem__, worker_view.ref))

    def update(self, name: str, **load: int) -> None:
        worker_view = self.views[ref(name)]
        old = worker_view.load
        self.views[ref(name)] = replace(worker_view, load=replace(old, **load))
        is_costlier = all(load[key] >= getattr(old, key) for key in ("num_running", "num_queued_tokens"))
        # A worker that became fuller needs no update.
        if not is_costlier or load["draining"] != old.draining or load["num_free_blocks"] > old.num_free_blocks:
            self.ranking.put(partial(self.views.__getitem__, ref(name)))

    def leave(self, name: str) -> None:
        if self.views.pop(ref(name), None) is not None:
            self.ranking.remove(ref(name))

    def place_with_both(self, policy: Disaggregation, excluded: frozenset[WorkerRef]) -> Placement | NoPlacement:
        """Place a request, and check that every ranking is sorted and that a new ranking gives the same choice."""
        able = [worker_view for worker_view in self.views.values() if not worker_view.load.draining]
        left = self.ranking.without(excluded)
        for ranked, cost, fits in (
            (left.prefill_workers("m", Lane.INTERACTIVE), prefill_cost, lambda worker_view: worker_view.prefills),
            (left.decode_workers("m", Lane.INTERACTIVE), decode_cost, lambda worker_view: worker_view.decodes),
            (left.mixed_workers("m", Lane.INTERACTIVE), local_cost, lambda worker_view: True),
        ):
            present = [worker_view for worker_view in able if fits(worker_view) and worker_view.ref not in excluded]
            assert list(ranked) == sorted(present, key=cost)
        assert left.pools("m", Lane.INTERACTIVE) == Counter(each.pool for each in able if each.ref not in excluded)
        slow = place(ranking_of(self.views.values(), self.linked), RoutingRequest("m", mode=policy), excluded)
        fast = place(self.ranking, RoutingRequest("m", mode=policy), excluded)
        assert fast == slow
        return fast


@effort(200)
@given(st.data())
def test_the_ranking_gives_the_choices_of_a_snapshot(data: st.DataObject) -> None:
    pools = data.draw(st.lists(st.sampled_from(["prefill", "decode", "mixed"]), min_size=1, max_size=6))
    names = [f"w{i}" for i in range(len(pools))]
    views = [worker(name, pool) for name, pool in zip(names, pools, strict=True)]
    every = [(p.ref, d.ref) for p in views for d in views if p.prefills and d.decodes and p is not d]
    linked = frozenset(pair for pair in every if data.draw(st.integers(0, 3)))
    board, small = RankedWorkers(views, linked), st.integers(0, 3)
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(names))
        if data.draw(st.integers(0, 12)) == 0:
            board.leave(name)
        elif ref(name) in board.views:
            board.update(
                name,
                num_running=data.draw(small),
                num_queued_tokens=data.draw(small),
                num_free_blocks=data.draw(small),
                draining=data.draw(st.integers(0, 5)) == 0,
            )
        excluded = frozenset(ref(n) for n in names if data.draw(st.integers(0, 4)) == 0)
        board.place_with_both(data.draw(st.sampled_from(["off", "auto", "prefer", "strict"])), excluded)


def test_the_heap_does_not_grow_with_updates() -> None:
    board = RankedWorkers([M1, M2], frozenset())
    for i in range(1000):
        board.update("m1", num_running=1 + i % 2, num_queued_tokens=0, num_free_blocks=0, draining=False)
        board.place_with_both("off", frozenset())
    assert all(
        len(heap._entries) < 20
        for group in board.ranking._by_model["m"].values()
        for heap in (group.mixed_workers, group.prefill_workers)
    )


def test_a_worker_with_enough_prompts_is_passed_over_and_no_other_pool_replaces_it() -> None:
    full = WorkerLoad(lane_tokens=(90, 90, 90), lane_longest=(50, 50, 50), num_horizon_tokens=60)
    busy, free = replace(P1, load=full), WorkerView(ref("p2"), "prefill", "m", "f", WorkerLoad(num_queued_tokens=99))
    request = RoutingRequest("m", 50)
    assert chosen(place(view(busy, free, D1, linked="p1-d1 p2-d1"), request)).startswith("p2-d1")
    assert place(view(busy, D1, linked="p1-d1"), request) is BUSY
    assert chosen(place(view(busy, D1, linked="p1-d1"), RoutingRequest("m", 10))).startswith("p1-d1")
    assert place(view(replace(M1, load=full), P1), replace(request, mode="off")) is BUSY, (
        "a prefill worker decodes only where none other does"
    )
