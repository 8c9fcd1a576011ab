"""Test what placements cost and which one is picked, over small views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tandem.core.config import Pool, RoutingPolicy
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost
from tandem.core.topology import Distance, Topology
from tandem.core.worker_load import WorkerLoad
from tandem.routing.candidates import pick_migration_target
from tandem.routing.cost import (
    HOST_BANDWIDTH,
    MESSAGES_S,
    NO_ROOM_S,
    DecodeCost,
    PrefillCost,
    RemotePrefixPlan,
    decode_cost,
    plan_remote_prefix,
    prefill_cost,
    transfer_s,
)
from tandem.routing.link_bandwidth import PRIOR_BANDWIDTH, LinkBandwidth
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.router import BUSY, WORTH_WAITING, Routing, place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_speed import WorkerSpeed
from tandem.routing.worker_view import WorkerView
from tests.unit.routing.rankings import all_linked, chosen, ranking_of

GPU = StepCost(2e-3, 3e-5, 2e-5, 1e-8, 1e-9)
BLOCK = 16


def worker(name: str, pool: Pool, *, unreported: tuple[int, ...] = (), **load: object) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    full = {"num_blocks": 10_000, "num_free_blocks": 10_000, **load}
    return WorkerView(ref, pool, "m", "f", WorkerLoad(**full), unreported, GPU, block_size=BLOCK, block_bytes=2 << 20)  # type: ignore[arg-type]


def request(num_prompt: int, hits: Mapping[str, int] | None = None, **rest: object) -> RoutingRequest:
    """Return a request; `hits` in tokens, by worker."""
    held = {
        WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1"): PrefixHit(tokens // BLOCK, tokens // BLOCK)
        for name, tokens in (hits or {}).items()
    }
    return RoutingRequest("m", num_prompt, num_prompt=num_prompt, hits=held, **rest)  # type: ignore[arg-type]


def prefilled(view: WorkerView, prompt: RoutingRequest, remote: RemotePrefixPlan | None = None) -> PrefillCost:
    return prefill_cost(WorkerSpeed(view, has_step_costs=True), prompt, remote)


def decoded(view: WorkerView, prompt: RoutingRequest) -> DecodeCost:
    return decode_cost(WorkerSpeed(view, has_step_costs=True), prompt)


P1, P2 = worker("p1", "prefill"), worker("p2", "prefill")
D1, D2 = worker("d1", "decode"), worker("d2", "decode")


def test_cached_tokens_are_not_computed_and_the_queue_adds_a_wait() -> None:
    cold = prefilled(P1, request(4000))
    warm = prefilled(P1, request(4000, {"p1": 3200}))
    behind = prefilled(worker("p1", "prefill", num_queued_tokens=4000), request(4000))
    unreported = prefilled(worker("p1", "prefill", unreported=(1000, 3000)), request(4000))
    assert (cold.num_uncached, warm.num_uncached) == (4000, 800)
    assert warm.compute_s < 0.25 * cold.compute_s and cold.wait_s == 0
    assert behind.wait_s == pytest.approx(unreported.wait_s, rel=0.1)
    assert unreported.wait_s > 3750 * GPU.prefill_token_s, "half of a step of 512 has gone"


def test_a_fully_cached_prompt_still_has_a_token_to_compute() -> None:
    assert prefilled(P1, request(160, {"p1": 160})).num_uncached == BLOCK
    assert request(161, {"p1": 160}).num_uncached(P1) == 1


def test_blocks_in_host_memory_cost_more_than_those_in_the_device_and_less_than_none() -> None:
    def seconds(hit: PrefixHit) -> float:
        return prefilled(P1, replace(request(4000), hits={P1.ref: hit})).compute_s

    assert seconds(PrefixHit(200, 200)) < seconds(PrefixHit(200, 50)) < seconds(PrefixHit(50, 50))


def test_only_the_exposed_part_of_a_transfer_counts_fully() -> None:
    fast, slow = LinkBandwidth(), LinkBandwidth()
    slow.observe(P1, D1, 1 << 32, 10.0)
    prefill = prefilled(P1, request(8192))
    all_s = 8192 / BLOCK * P1.block_bytes / slow.bandwidth(P1, D1)
    assert all_s > prefill.compute_s, "the link is slower than the computation"
    assert transfer_s(prefill, decoded(D1, request(8192)), slow) > all_s - prefill.compute_s
    assert transfer_s(prefill, decoded(D1, request(8192)), fast) < 0.2 * all_s
    assert transfer_s(prefill, decoded(D1, request(8192, {"d1": 8000})), slow) < 0.2 * all_s


def test_the_decode_worker_has_few_sequences_and_free_blocks() -> None:
    free, busy = (decoded(worker("d1", "decode", num_running=n), request(1000)) for n in (1, 60))
    full = decoded(worker("d1", "decode", num_free_blocks=10), request(1000))
    assert busy.decode_s > free.decode_s
    assert (free.room_s, full.room_s) == (0.0, NO_ROOM_S)
    assert chosen(place(all_linked(P1, worker("d1", "decode", num_free_blocks=10), D2), request(1000))) == "p1 d2"


@pytest.mark.parametrize(
    ("queued_at_p1", "expected"), [(0, "p1"), (3000, "p1"), (40_000, "p2")]
)  # fmt: skip
def test_a_cached_prefix_is_worth_a_queue_that_costs_less(queued_at_p1: int, expected: str) -> None:
    cluster, links = all_linked(worker("p1", "prefill", num_queued_tokens=queued_at_p1), P2, D1), LinkBandwidth()
    links.observe(P1, D1, 1 << 34, 0.1)
    links.observe(P2, D1, 1 << 34, 0.1)
    placed = place(cluster, request(16_000, {"p1": 12_000}), routing=Routing(links=links, remote_prefix=False))
    assert chosen(placed).startswith(expected)


def describe(outcome: Placement | NoPlacement) -> str:
    """Return the chosen workers, and what is fetched from another."""
    assert isinstance(outcome, Placement), outcome
    prefix = outcome.prefix
    return chosen(outcome) + ("" if prefix is None else f" reads {prefix.num_blocks * BLOCK} of {prefix.producer.id}")


BUSY_HOLDER = worker("p1", "prefill", num_queued_tokens=60_000)
HELD = {"p1": 12_000}


@pytest.mark.parametrize(
    ("workers", "hits", "expected"),
    [
        ((BUSY_HOLDER, P2, D1), HELD, "p2 d1 reads 12000 of p1"),
        ((P1, P2, D1), HELD, "p1 d1"),
        ((P2, worker("d1", "decode", num_running=9), D2), {"d1": 12_000}, "p2 d1 reads 12000 of d1"),
        ((BUSY_HOLDER, P2, D1), {"p1": 12_000, "p2": 11_984}, "p2 d1"),
        ((replace(BUSY_HOLDER, fingerprint="g"), P2, D1), HELD, "p2 d1"),
        ((replace(BUSY_HOLDER, block_bytes=1 << 20), P2, D1), HELD, "p2 d1"),
        ((worker("p1", "prefill", draining=True), P2, D1), HELD, "p2 d1"),
    ],
)  # fmt: skip
def test_a_remote_prefix_is_fetched_where_that_takes_less_than_computing_it(
    workers: tuple[WorkerView, ...], hits: Mapping[str, int], expected: str
) -> None:
    assert describe(place(all_linked(*workers), request(16_000, hits))) == expected


def test_no_prefix_is_fetched_over_a_slow_or_failed_link_or_when_switched_off() -> None:
    cluster, slow = all_linked(BUSY_HOLDER, P2, D1), LinkBandwidth()
    slow.observe(BUSY_HOLDER, P2, 1 << 32, 100.0)
    routing_request = request(16_000, HELD)
    assert describe(place(cluster, routing_request, routing=Routing(links=slow))) == "p2 d1"
    assert describe(place(cluster, routing_request, routing=Routing(remote_prefix=False))) == "p2 d1"
    for failed in ((P2.ref, P1.ref), (P1.ref, P2.ref)):
        apart = ranking_of([BUSY_HOLDER, P2, D1], cluster.linked, frozenset({failed}))
        assert describe(place(apart, routing_request)) == "p2 d1"
    suspected = place(cluster, routing_request, frozenset({P1.ref}))
    assert describe(suspected) == "p2 d1", "excluded workers serve no prefixes"


def test_a_local_placement_fetches_too() -> None:
    busy = worker("m1", "mixed", num_queued_tokens=40_000)
    placed = place(all_linked(busy, worker("m2", "mixed")), request(16_000, {"m1": 12_000}, mode="off"))
    assert describe(placed) == "m2 m2 reads 12000 of m1"
    assert isinstance(placed, Placement)
    assert placed.reasons["prefix"] == {"source": "m1", "num_blocks": 750}


def test_a_worker_that_would_reject_the_prompt_accepts_it_with_a_remote_prefix() -> None:
    full = {"lane_tokens": (1500,) * 3, "lane_longest": (1000,) * 3, "num_horizon_tokens": 1024}
    cluster = all_linked(worker("p1", "prefill", num_queued_tokens=90_000), worker("p2", "prefill", **full), D1)
    assert place(cluster, request(16_000), frozenset({P1.ref})) is BUSY
    assert describe(place(cluster, request(12_080, HELD))) == "p2 d1 reads 12000 of p1"


def fetch_plan(
    producer: WorkerView, consumer: WorkerView, routing_request: RoutingRequest | None = None
) -> RemotePrefixPlan:
    """Return the plan for a request of which the producer holds 12,000 tokens, if no other request is given."""
    source, target = (WorkerSpeed(one, has_step_costs=True) for one in (producer, consumer))
    return plan_remote_prefix(source, target, routing_request or request(16_000, HELD), LinkBandwidth())


def test_a_prefix_fetch_waits_for_the_ends_of_steps_on_both_sides() -> None:
    free, late = fetch_plan(P1, P2), fetch_plan(BUSY_HOLDER, P2)
    busy = fetch_plan(P1, worker("p2", "prefill", num_queued_tokens=30_000))
    assert (free.producer, free.num_tokens, free.num_read) == (P1.ref, 12_000, 12_000)
    assert free.read_s > 2 * MESSAGES_S
    step_s = GPU.base_s + 512 * GPU.prefill_token_s
    assert late.read_s - free.read_s == pytest.approx(step_s / 2), "the producer's own"
    assert busy.read_s - free.read_s > step_s / 2
    last = fetch_plan(P1, worker("p2", "prefill", num_queued_tokens=512))
    assert last.read_s - free.read_s == pytest.approx(step_s / 2), "the consumer has no further step to end"
    assert fetch_plan(P1, P2, request(16_000, {"p1": 12_000, "p2": 8000})).num_read == 4000


def test_a_prefix_fetch_is_hidden_by_the_queue() -> None:
    routing_request, consumer = request(16_000, HELD), worker("p2", "prefill", num_queued_tokens=30_000)
    free, hidden = (prefilled(one, routing_request, fetch_plan(P1, one)) for one in (P2, consumer))
    assert free.num_uncached == hidden.num_uncached == 4000 and free.num_lacking == 16_000
    assert hidden.read_s < 0.2 * free.read_s


def test_blocks_in_host_memory_are_served_later_than_those_of_the_device() -> None:
    hits = {P1.ref: PrefixHit(750, 0)}
    placed = place(all_linked(BUSY_HOLDER, P2, D1), replace(request(16_000), hits=hits))
    assert describe(placed) == "p2 d1 reads 12000 of p1"
    on_device, in_host = (
        fetch_plan(P1, P2, replace(request(16_000), hits={P1.ref: PrefixHit(750, num_device)}))
        for num_device in (750, 0)
    )
    assert in_host.num_read == on_device.num_read
    assert in_host.read_s - on_device.read_s == pytest.approx(750 * P1.block_bytes / HOST_BANDWIDTH)


def test_a_holder_is_found_however_loaded_it_is() -> None:
    idle = [worker(f"p{i}", "prefill") for i in range(2, 60)]
    cluster = all_linked(worker("p1", "prefill", num_queued_tokens=500), *idle, D1)
    assert chosen(place(cluster, request(16_000, {"p1": 15_000}))) == "p1 d1"


def test_blocks_held_by_a_consumer_attract_the_request() -> None:
    links = LinkBandwidth()
    links.observe(P1, D1, 1 << 30, 4.0)
    cluster = all_linked(P1, D1, D2)
    for key in map(str, range(8)):
        assert chosen(place(cluster, request(8000, {"d2": 7000}, key=key), routing=Routing(links=links))) == "p1 d2"


def test_the_nearer_of_two_consumers_is_chosen_before_anything_was_measured() -> None:
    here, there = Topology("h1", "r1", "z1"), Topology("h2", "r2", "z2")
    cluster = all_linked(replace(P1, topology=here), replace(D1, topology=there), replace(D2, topology=here))
    assert {chosen(place(cluster, request(16_000, key=str(i)))) for i in range(8)} == {"p1 d2"}


def test_equal_views_give_equal_placements_and_equals_share_the_requests() -> None:
    cluster = all_linked(P1, P2, D1, D2)
    seen = [chosen(place(cluster, request(500, key=f"r{i}"))) for i in range(200)]
    assert seen == [chosen(place(cluster, request(500, key=f"r{i}"))) for i in range(200)]
    assert {name: 20 < seen.count(name) < 120 for name in set(seen)} == dict.fromkeys(
        ("p1 d1", "p1 d2", "p2 d1", "p2 d2"), True
    )


def test_a_session_stays_where_it_is_among_equals_and_only_there() -> None:
    cluster = all_linked(P1, P2, D1, D2)
    homes = {chosen(place(cluster, request(500, key=f"r{i}", session="alice"))) for i in range(50)}
    assert len(homes) == 1
    (home,) = homes
    producer = P1 if home.startswith("p1") else P2
    busy = replace(producer, load=replace(producer.load, num_queued_tokens=20_000))
    moved = all_linked(*(busy if view is producer else view for view in (P1, P2, D1, D2)))
    assert not chosen(place(moved, request(500, session="alice"))).startswith(producer.ref.id)


@pytest.mark.parametrize(
    ("workers", "routing_request", "path"),
    [
        ((P1, D1), request(50), "local;reason=short_prompt"),
        ((P1, D1), request(8000, {"d1": 7900, "p1": 0}), "local;reason=cached_prompt"),
        ((worker("p1", "prefill", num_queued_tokens=200_000), D1), request(8000), "local;reason=prefill_busy"),
        ((P1, worker("d1", "decode", num_running=60)), request(30_000), "remote"),
        ((worker("p1", "prefill", draining=True), D1), request(30_000), "fallback;reason=no_prefill_worker"),
        ((worker("m1", "mixed"), worker("m2", "mixed")), request(50), "local"),
    ],
)  # fmt: skip
def test_auto_splits_where_that_costs_less_and_reports_why_not(
    workers: tuple[WorkerView, ...], routing_request: RoutingRequest, path: str
) -> None:
    placed = place(all_linked(*workers), replace(routing_request, mode="auto"))
    assert isinstance(placed, Placement) and placed.path == path
    assert placed.picked is not None and placed.reasons["cost_ms"]
    if ";reason=" not in path.removeprefix("fallback") and path == "remote":
        assert placed.other is not None and placed.other.is_local
        assert placed.other.total_s > placed.picked.cost.total_s


def test_auto_stays_local_while_no_pair_is_linked() -> None:
    placed = place(ranking_of([P1, D1]), request(8000, mode="auto"))
    assert isinstance(placed, Placement) and placed.path == "fallback;reason=no_link_between_the_workers"


def test_a_busy_prefix_holder_is_waited_for_where_that_saves_more() -> None:
    def holding(num_queued: int) -> WorkerView:
        lanes = (num_queued,) * 3
        return worker(
            "p1", "prefill", num_queued_tokens=num_queued, lane_tokens=lanes, lane_longest=(0, 0, 0),
            num_horizon_tokens=1024,
        )  # fmt: skip

    routing_request, alone = request(30_000, {"p1": 28_000}), Routing(remote_prefix=False)
    assert place(all_linked(holding(2000), P2, D1), routing_request, routing=alone) is WORTH_WAITING
    assert chosen(place(all_linked(holding(60_000), P2, D1), routing_request, routing=alone)) == "p2 d1"
    assert chosen(place(all_linked(holding(2000), P2, D1), request(30_000))) == "p2 d1", "there is nothing to save"
    assert describe(place(all_linked(holding(2000), P2, D1), routing_request)) == "p2 d1 reads 28000 of p1", (
        "nor to wait for"
    )


def test_the_target_of_a_migration() -> None:
    """The source may be draining and need not be among the workers that take new work."""
    gone = worker("p9", "decode", draining=True)
    second = worker("d2", "decode", num_running=200)
    cluster = all_linked(P1, D1, second)
    for producer in (P1, gone):
        assert pick_migration_target(cluster, "m", Lane.INTERACTIVE, producer.ref) == D1.ref
        assert pick_migration_target(cluster.without({D1.ref}), "m", Lane.INTERACTIVE, producer.ref) == second.ref
    assert pick_migration_target(cluster.without({D1.ref}).without({second.ref}), "m", Lane.INTERACTIVE, P1.ref) is None
    failed = ranking_of([P1, D1, second], unlinked=frozenset({(gone.ref, D1.ref)}))
    assert pick_migration_target(failed, "m", Lane.INTERACTIVE, gone.ref) == second.ref


@pytest.mark.parametrize("policy", ["random", "round_robin", "least_loaded", "prefix"])
def test_policies_keep_to_the_filter_and_to_pairs(policy: RoutingPolicy) -> None:
    linked = ranking_of([P1, P2, D1, D2], frozenset({(P2.ref, D1.ref)}))
    assert chosen(place(linked, request(100, key="r"), routing=Routing(policy))) == "p2 d1"
    full = worker("p1", "prefill", lane_tokens=(9, 9, 9), lane_longest=(0, 0, 0), num_horizon_tokens=5)
    assert chosen(place(all_linked(full, P2, D1), request(100), routing=Routing(policy))) == "p2 d1"
    assert isinstance(place(all_linked(full, D1), request(100), routing=Routing(policy)), NoPlacement)
    local = place(all_linked(D1, D2), request(100, mode="off"), frozenset({D1.ref}), Routing(policy))
    assert chosen(local) == "d2 d2"


def test_policies_order_as_named() -> None:
    cluster = all_linked(P1, P2, D1)
    turns = [chosen(place(cluster, request(9, turn=i), routing=Routing("round_robin"))) for i in range(4)]
    assert turns == ["p1 d1", "p2 d1", "p1 d1", "p2 d1"]
    sampled = {chosen(place(cluster, request(9, key=str(i)), routing=Routing("random"))) for i in range(20)}
    assert sampled == {"p1 d1", "p2 d1"}
    busy = all_linked(worker("p1", "prefill", num_queued_tokens=10**6), P2, D1)
    assert chosen(place(busy, request(500, {"p1": 400}), routing=Routing("prefix"))) == "p1 d1"
    assert chosen(place(busy, request(500, {"p1": 400}), routing=Routing("least_loaded"))) == "p2 d1"


def test_workers_are_compared_by_tokens_while_one_has_not_reported_its_costs() -> None:
    slow = replace(worker("p1", "prefill"), step_cost=StepCost(1.0, 1.0, 1.0, 0.0, 0.0))
    unknown = replace(worker("p2", "prefill", num_queued_tokens=5000), step_cost=None)
    assert chosen(place(all_linked(slow, unknown, D1), request(1000))) == "p1 d1"
    known = replace(unknown, step_cost=GPU)
    assert chosen(place(all_linked(slow, known, D1), request(1000))) == "p2 d1"


def test_bandwidth_is_the_prior_then_that_of_the_distance_then_as_measured() -> None:
    links, near = LinkBandwidth(), Topology("h", "r", "z")
    a, b, c = (replace(view, topology=near) for view in (P1, D1, D2))
    assert links.bandwidth(a, b) == PRIOR_BANDWIDTH[Distance.HOST] > links.bandwidth(P1, D1)
    for _ in range(20):
        links.observe(a, b, 1 << 30, 1.0)
    assert links.bandwidth(a, b) == pytest.approx(1 << 30, rel=0.1)
    assert links.bandwidth(a, c) == pytest.approx(1 << 30, rel=0.1), "as others on one host"
    assert links.bandwidth(P2, D1) == PRIOR_BANDWIDTH[Distance.FAR], "of another kind"
    for _ in range(20):
        links.observe(a, c, 1 << 30, 0.1)
    assert links.bandwidth(a, c) > 5 * links.bandwidth(a, b)
    links.forget(c.ref)
    assert links.bandwidth(a, c) == links.bandwidth(replace(P2, topology=near), c), "of this pair nothing is known now"


def test_a_tiny_pull_hardly_counts() -> None:
    links = LinkBandwidth()
    before = links.bandwidth(P1, D1)
    links.observe(P1, D1, 4096, 1e-3)
    links.observe(P1, D1, 0, 0.0)
    assert links.bandwidth(P1, D1) == pytest.approx(before, rel=0.25)


def test_unlabelled_workers_are_near_nothing() -> None:
    assert Topology().distance(Topology()) == Topology("a").distance(Topology("b")) == 3
    assert [
        int(Topology("h", "r", "z").distance(t)) for t in (Topology("h"), Topology("", "r"), Topology("", "", "z"))
    ] == [0, 1, 2]


def test_a_link_that_becomes_slow_is_known_to_be_after_a_few_reads() -> None:
    links = LinkBandwidth()
    for _ in range(1000):
        links.observe(P1, D1, 8 << 20, 0.01)
    assert links.bandwidth(P1, D1) > 5e8
    for _ in range(5):
        links.observe(P1, D1, 1 << 20, 1.0)
    assert links.bandwidth(P1, D1) < 3e7
    for _ in range(50):
        links.observe(P1, D1, 64 << 20, 0.08)
    assert links.bandwidth(P1, D1) > 5e8, "and a mended one too"


def test_small_reads_over_a_long_link_leave_its_bandwidth_as_it_is() -> None:
    links = LinkBandwidth()
    for _ in range(20):
        links.observe(P1, D1, 64 << 20, 0.86)
    before = links.bandwidth(P1, D1)
    for _ in range(50):
        links.observe(P1, D1, 64 << 10, 0.2)
    assert links.bandwidth(P1, D1) > 0.5 * before


def test_one_slow_link_does_not_stand_for_all_of_its_distance() -> None:
    links = LinkBandwidth()
    for _ in range(1000):
        links.observe(P1, D1, 8 << 20, 0.008)
    links.observe(P2, D1, 8 << 20, 8.0)
    assert links.bandwidth(P2, D1) < 1e7
    assert links.bandwidth(P2, D2) > 5e8 and links.bandwidth(P1, D1) > 5e8
    for _ in range(100):
        links.observe(P2, D1, 8 << 20, 8.0)
    assert links.bandwidth(P1, D2) < 1e8, "but many do"
