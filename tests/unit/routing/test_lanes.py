"""Test that requests are placed only on workers that serve their lane, and that other workers cost them nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Disaggregation, Pool, RoutingPolicy
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.routing.candidates import NUM_BY_HITS, pick_migration_target
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.router import BUSY, NO_SEAT, WORTH_WAITING, Routing, place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import WorkerView
from tests.effort import effort
from tests.unit.routing.rankings import all_linked, chosen

BATCH, URGENT = frozenset({Lane.BATCH}), frozenset({Lane.INTERACTIVE, Lane.STANDARD})
FREE = WorkerLoad(num_blocks=10_000, num_free_blocks=10_000)
LANES = [ALL_LANES, BATCH, URGENT, frozenset({Lane.INTERACTIVE})]


def worker(name: str, pool: Pool, lanes: frozenset[Lane] = ALL_LANES, **load: int) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    cost = StepCost(2e-3, 3e-5, 2e-5, 1e-8, 1e-9)
    return WorkerView(
        ref, pool, "m", "f", replace(FREE, **load), step_cost=cost, block_size=16, block_bytes=2 << 20, lanes=lanes
    )


@effort(300)
@given(st.data())
def test_a_lane_is_placed_as_if_workers_of_other_lanes_did_not_exist(data: st.DataObject) -> None:
    pools: list[Pool] = data.draw(st.lists(st.sampled_from(["prefill", "decode", "mixed"]), min_size=1, max_size=8))
    numbers = st.integers(0, 3)
    views = [
        worker(
            f"w{i}", pool, data.draw(st.sampled_from(LANES)), num_queued_tokens=data.draw(numbers),
            num_running=data.draw(numbers),
        )
        for i, pool in enumerate(pools)
    ]  # fmt: skip
    lane, mode = data.draw(st.sampled_from(list(Lane))), data.draw(st.sampled_from(["off", "auto", "prefer", "strict"]))
    excluded = frozenset(view.ref for view in views if data.draw(st.integers(0, 5)) == 0)
    routing = Routing(data.draw(st.sampled_from(["cost", "least_loaded", "round_robin"])), remote_prefix=False)
    blocks = st.integers(0, 6)
    hits = {view.ref: PrefixHit(number, number) for view in views if (number := data.draw(blocks))}
    yields_to = frozenset(one for one in Lane if one < lane and data.draw(st.booleans()))
    request = RoutingRequest("m", 100, lane=lane, num_prompt=100, mode=mode, hits=hits, yields_to=yields_to)
    outcome = place(all_linked(*views), request, excluded, routing)
    own = [view for view in views if lane in view.lanes]
    alone = place(all_linked(*own), request, excluded, routing)
    if own or not views:
        assert outcome == alone
    else:
        assert outcome == NoPlacement(f"no worker serves the lane {lane.label}", may_pass=False)
    if isinstance(outcome, Placement):
        assert {outcome.prefill, outcome.decode} <= {view.ref for view in own}
        (chosen_prefill,) = (view for view in own if view.ref == outcome.prefill)
        assert yields_to.isdisjoint(chosen_prefill.lanes)


@effort(200)
@given(st.data())
def test_rankings_of_a_lane_are_sorted_while_loads_change(data: st.DataObject) -> None:
    views = {view.ref: view for view in (worker(f"w{i}", "mixed", LANES[i % 4]) for i in range(8))}
    ranking = WorkerRanking(frozenset(), frozenset())
    for _ in range(data.draw(st.integers(1, 20))):
        ref = data.draw(st.sampled_from(sorted(views)))
        load = replace(views[ref].load, num_running=data.draw(st.integers(0, 3)), draining=data.draw(st.booleans()))
        views[ref] = replace(views[ref], load=load)
        ranking.put(lambda ref=ref: views[ref])  # type: ignore[misc]
        absent = frozenset(data.draw(st.lists(st.sampled_from(sorted(views)), max_size=2)))
        for lane in Lane:
            left = ranking.without(absent)
            ranked = list(left.decode_workers("m", lane))
            assert ranked == sorted(ranked, key=lambda view: (view.load.num_running, view.ref.id))
            assert {view.ref for view in left.prefillers("m", lane)} == {view.ref for view in ranked}
            assert left.pools("m", lane) == Counter(view.pool for view in ranked)
            assert all(lane in view.lanes and not view.load.draining and view.ref not in absent for view in ranked)
        assert all(lanes in LANES for lanes in ranking.lanes("m"))


def watched(views: Sequence[WorkerView]) -> tuple[WorkerRanking, Counter[WorkerRef]]:
    """Rank workers, and count how often the view of each is built from then on."""
    looks: Counter[WorkerRef] = Counter()
    ranking = WorkerRanking(frozenset(), frozenset())

    def look(view: WorkerView) -> WorkerView:
        looks[view.ref] += 1
        return view

    for view in views:
        ranking.put(lambda view=view: look(view))  # type: ignore[misc]
    looks.clear()
    return ranking, looks


def test_a_request_does_not_look_at_the_workers_of_other_lanes() -> None:
    views = [worker(f"i{i}", "mixed", URGENT) for i in range(200)] + [worker("b", "mixed", BATCH)]
    ranking, looks = watched(views)
    assert chosen(place(ranking, RoutingRequest("m", lane=Lane.BATCH))) == "b b"
    assert looks.keys() == {views[-1].ref}


def test_only_the_workers_that_hold_most_of_the_prompt_are_looked_at_where_lanes_differ() -> None:
    views = [worker(f"i{i}", "mixed", URGENT if i % 2 else ALL_LANES) for i in range(200)]
    ranking, looks = watched(views)
    hits = {view.ref: PrefixHit(i, i) for i, view in enumerate(views)}
    place(ranking, RoutingRequest("m", num_prompt=16_000, mode="off", hits=hits))
    assert len(looks) <= 3 * NUM_BY_HITS


def test_a_worker_whose_lanes_change_serves_only_the_new_ones() -> None:
    before, other = worker("a", "mixed", BATCH), worker("b", "mixed", BATCH, num_running=9)
    views = {view.ref: view for view in (before, other)}
    ranking = WorkerRanking(frozenset(), frozenset())
    for lanes in (BATCH, ALL_LANES, URGENT):
        views[before.ref] = replace(before, lanes=lanes)
        for ref in views:
            ranking.put(lambda ref=ref: views[ref])  # type: ignore[misc]
        found = {lane: [view.ref.id for view in ranking.decode_workers("m", lane)] for lane in Lane}
        assert found == {lane: [view.ref.id for view in views.values() if lane in view.lanes] for lane in Lane}


@pytest.mark.parametrize(("lane", "expected"), [(Lane.BATCH, "b"), (Lane.INTERACTIVE, "i")])
def test_a_sequence_migrates_only_to_a_worker_of_its_lane(lane: Lane, expected: str) -> None:
    urgent, batch = worker("i", "decode", URGENT, num_running=5), worker("b", "decode", BATCH, num_running=9)
    source = worker("s", "decode")
    found = pick_migration_target(all_linked(urgent, batch, source), "m", lane, source.ref)
    assert found is not None and found.id == expected
    assert pick_migration_target(all_linked(source), "m", lane, source.ref) is None
    other = urgent if lane is Lane.BATCH else batch
    assert pick_migration_target(all_linked(source, other), "m", lane, source.ref) is None


def test_a_sequence_migrates_only_to_a_worker_of_its_build() -> None:
    """Also from a draining worker, which is not ranked any more, as in an upgrade to another build."""
    source, new = worker("s", "decode"), replace(worker("n", "decode"), fingerprint="g")
    for leaving in (source, replace(source, load=replace(source.load, draining=True))):
        ranking = all_linked(leaving, new, worker("o", "decode", num_running=9))
        found = pick_migration_target(ranking, "m", Lane.BATCH, source.ref)
        assert found is not None and found.id == "o"
        assert pick_migration_target(all_linked(leaving, new), "m", Lane.BATCH, source.ref) is None
        ranking.remove(source.ref)
        assert ranking.fingerprint(source.ref) is None


def test_a_prefix_is_read_from_a_worker_of_another_lane() -> None:
    held, own = worker("b", "mixed", BATCH), worker("i", "mixed", URGENT)
    request = RoutingRequest("m", num_prompt=16_000, mode="off", hits={held.ref: PrefixHit(900, 900)})
    outcome = place(all_linked(held, own), request)
    assert chosen(outcome) == "i i" and isinstance(outcome, Placement)
    assert outcome.prefix is not None
    assert (outcome.prefix.producer, outcome.prefix.num_blocks) == (held.ref, 900)


def test_a_worker_that_holds_the_prompt_is_compared_although_many_of_other_lanes_hold_more() -> None:
    """The holder is not among the least loaded, so only its prefix puts it on the shortlist."""
    others = [worker(f"b{i}", "mixed", BATCH) for i in range(NUM_BY_HITS)]
    idle = [worker(f"i{i}", "mixed", URGENT) for i in range(8)]
    holder = worker("k", "mixed", URGENT, num_queued_tokens=1)
    hits = {view.ref: PrefixHit(950, 950) for view in others} | {holder.ref: PrefixHit(900, 900)}
    request = RoutingRequest("m", num_prompt=16_000, mode="off", hits=hits)
    assert chosen(place(all_linked(*others, *idle, holder), request, routing=Routing(remote_prefix=False))) == "k k"


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_worker_that_holds_the_prompt_is_compared_although_many_that_take_no_work_hold_more(
    is_draining: bool,
) -> None:
    """As in an upgrade, in which the old workers drain. Those that are left out have failed."""
    old = [worker(f"a{i}", "mixed", draining=is_draining) for i in range(NUM_BY_HITS)]
    idle, holder = [worker(f"i{i}", "mixed") for i in range(8)], worker("k", "mixed", num_queued_tokens=1)
    hits = {view.ref: PrefixHit(950, 950) for view in old} | {holder.ref: PrefixHit(900, 900)}
    request = RoutingRequest("m", num_prompt=16_000, mode="off", hits=hits)
    ranking = all_linked(*old, *idle, holder).without(set() if is_draining else {view.ref for view in old})
    assert chosen(place(ranking, request, routing=Routing(remote_prefix=False))) == "k k"


@pytest.mark.parametrize("mode", ["off", "prefer", "strict", "auto"])
def test_a_worker_for_which_a_more_urgent_lane_waits_counts_as_full(mode: Disaggregation) -> None:
    shared, decode = worker("p", "prefill"), worker("d", "decode", BATCH)
    pair = all_linked(shared, decode)
    request = RoutingRequest("m", 2000, num_prompt=2000, lane=Lane.BATCH, mode=mode)
    behind = replace(request, yields_to=frozenset({Lane.INTERACTIVE}))
    assert isinstance(place(pair, request), Placement)
    if mode in ("prefer", "strict"):
        assert place(pair, behind) is BUSY
        own = worker("q", "prefill", BATCH, num_queued_tokens=10**6)
        assert chosen(place(all_linked(shared, decode, own), behind)) == "q d"
    else:
        assert chosen(place(pair, behind)) == "d d", "this worker serves no lane that waits"


def test_a_prefix_on_a_worker_for_which_a_more_urgent_lane_waits_is_not_waited_for() -> None:
    """Its wait is longer than its load tells, so an idle worker of the lane is used."""
    full = replace(FREE, lane_tokens=(500,) * 3, lane_longest=(400,) * 3, num_horizon_tokens=150)
    holder, idle = replace(worker("a", "mixed"), load=full), worker("b", "mixed", BATCH)
    hits = {holder.ref: PrefixHit(900, 900)}
    request = RoutingRequest("m", num_prompt=16_000, lane=Lane.BATCH, mode="off", hits=hits)
    routing = Routing(remote_prefix=False)
    assert place(all_linked(holder, idle), request, routing=routing) is WORTH_WAITING
    behind = replace(request, yields_to=frozenset({Lane.STANDARD}))
    assert chosen(place(all_linked(holder, idle), behind, routing=routing)) == "b b"


def test_workers_without_a_common_lane_are_not_linked() -> None:
    p, q = worker("p", "prefill", BATCH), worker("q", "prefill")
    d, e = worker("d", "decode", URGENT), worker("e", "decode", BATCH)
    pairs = PairRegistry("prefer")
    tested = {pair for pair, _ in pairs.due([p, q, d, e], 0.0)}
    assert tested == {(p.ref, e.ref), (q.ref, d.ref), (q.ref, e.ref)}
    for pair in tested:
        pairs.ended(pair, moved=True, retry_at=1.0)
    assert pairs.linked == tested
    again = replace(p, ref=replace(p.ref, incarnation=Incarnation(2)), lanes=URGENT)
    assert {pair for pair, _ in pairs.due([again, q, d, e], 1.0)} == {(again.ref, d.ref)}


def seated(name: str, *seats: int, num_inflight: int = 0) -> WorkerView:
    """Return a decode worker of four seats, of which sequences of each lane take some."""
    view = worker(name, "decode", num_running=sum(seats))
    load = replace(view.load, lane_seqs=(*seats, *(0,) * (3 - len(seats))))
    return replace(view, load=load, num_inflight=num_inflight, max_num_seqs=4)


def placed(lane: Lane, *decoders: WorkerView, mode: Disaggregation = "prefer", policy: RoutingPolicy = "cost") -> str:
    """Return the decode worker of a request, or why it waits."""
    request = RoutingRequest("m", 100, lane=lane, num_prompt=100, mode=mode)
    outcome = place(all_linked(worker("p", "prefill"), *decoders), request, frozenset(), Routing(policy))
    return outcome.decode.id if isinstance(outcome, Placement) else outcome.reason


@pytest.mark.parametrize("policy", ["cost", "least_loaded"])
@pytest.mark.parametrize("mode", ["auto", "prefer", "strict"])
def test_a_request_waits_while_no_decode_worker_has_a_seat_for_its_lane(
    mode: Disaggregation, policy: RoutingPolicy
) -> None:
    def outcome(lane: Lane, *decoders: WorkerView) -> str:
        return placed(lane, *decoders, mode=mode, policy=policy)

    assert outcome(Lane.BATCH, seated("d", 2, 1, 1)) == NO_SEAT.reason
    assert outcome(Lane.BATCH, seated("d", 2, 1, 0)) == "d"
    assert outcome(Lane.BATCH, seated("d", 2, 1, 0, num_inflight=1)) == NO_SEAT.reason
    assert outcome(Lane.INTERACTIVE, seated("d", 3, 1, 0)) == "d", "a less urgent sequence yields"
    assert outcome(Lane.INTERACTIVE, seated("d", 4, 0, 0)) == NO_SEAT.reason
    assert outcome(Lane.BATCH, replace(seated("d", 9), max_num_seqs=0)) == "d", "the number of seats is not known"


def test_of_many_decode_workers_those_with_a_seat_are_found() -> None:
    urgent = [seated(f"u{number}", 4) for number in range(30)]
    assert placed(Lane.INTERACTIVE, *urgent, seated("z", 1, 0, 4)) == "z", "its ranking is the last"
    assert placed(Lane.INTERACTIVE, *urgent) == NO_SEAT.reason
