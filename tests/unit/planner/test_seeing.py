"""Test what the planner derives from its observations: demand since the last look, pool states, and pool targets."""

from __future__ import annotations

import math
from typing import Any

from tandem.core.config import SloConfig
from tandem.core.ids import GatewayId, Incarnation, WorkerId, WorkerRef
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.planner.demand_delta import DemandDelta, DemandDeltaResult
from tandem.planner.planner_loop import problem_of
from tandem.planner.pool_targets import chosen_for, pool_targets
from tandem.scaling.cluster_state import PoolState, WorkerCapacity
from tandem.scaling.decision import ReplicaTarget, RoleChange
from tandem.scaling.demand_totals import DemandTotals, QueueBacklog
from tandem.scaling.worker_state import WorkerState, build_observation
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.stores.demand_store import DemandRecord

WAITING = QueueBacklog(num_requests=2, num_tokens=40)
NONE = QueueBacklog()


def word(
    gateway: str, num_requests: int, age_s: float = 0.5, backlog: QueueBacklog = NONE, lived_s: float = math.inf
) -> DemandRecord:
    totals = DemandTotals(num_requests=num_requests, num_input_tokens=10 * num_requests)
    return DemandRecord(
        gateway=GatewayId(gateway), totals={"m": totals}, backlog={"m": backlog}, lived_s=lived_s, age_s=age_s
    )


def worker(name: str, role: str, pool: str = "", num_jobs: int = 0, *, draining: bool = False) -> WorkerState:
    ref = WorkerRef(WorkerId(name), Incarnation(1), "h:1")
    load = WorkerLoad(num_running=num_jobs, num_queued_tokens=7, draining=draining)
    return WorkerState(ref=ref, model="m", pool=pool or role, role=role, load=load, capability=able(1.0))


def able(base_s: float) -> WorkerCapacity:
    cost = StepCost(base_s, 0.0, 0.0, 0.0, 0.0)
    return WorkerCapacity(cost=cost, num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)


def silent(name: str, role: str) -> WorkerState:
    ref = WorkerRef(WorkerId(name), Incarnation(1), "h:1")
    return WorkerState(ref=ref, model="m", pool=role, role=role, problem="unavailable")


def grown(*looks: tuple[float, list[DemandRecord]]) -> DemandDeltaResult:
    growth = DemandDelta("m")
    return [growth.look(records, now) for now, records in looks][-1]


def test_demand_is_the_difference_between_two_looks() -> None:
    first = grown((10.0, [word("a", 100)]))
    assert first.demand is None and "first look" in first.problem
    delta = grown((10.0, [word("a", 100)]), (14.0, [word("a", 130), word("b", 5, backlog=WAITING, lived_s=3.0)]))
    assert delta.demand is not None and (delta.demand.seconds, delta.demand.num_requests) == (4.0, 35)
    assert delta.demand.num_input_tokens == 350 and delta.backlog == WAITING
    assert delta.num_gateways == 2 and delta.problem == ""


def test_a_gateway_that_ended_takes_nothing_back() -> None:
    delta = grown((0.0, [word("a", 100), word("b", 50)]), (5.0, [word("b", 60)]))
    assert delta.demand is not None and delta.demand.num_requests == 10
    assert grown((0.0, [word("a", 100)]), (5.0, [word("a", 40)])).demand.num_requests == 0  # type: ignore[union-attr]


def test_a_gateway_that_was_away_counts_from_its_next_word_on() -> None:
    """The totals of its whole life did not arise in the last five seconds."""
    looks = [
        (0.0, [word("a", 100), word("b", 1_000_000)]),
        (5.0, [word("a", 110)]),
        (10.0, [word("a", 120), word("b", 1_000_050, lived_s=9e5)]),
        (15.0, [word("a", 130), word("b", 1_000_080, lived_s=9e5)]),
    ]
    for number, expected in ((3, 10), (4, 40)):
        delta = grown(*looks[:number])
        assert delta.demand is not None and delta.demand.num_requests == expected
    older = grown((0.0, [word("a", 1)]), (5.0, [word("a", 1), word("c", 70, lived_s=4.8)]))
    assert older.demand is not None and older.demand.num_requests == 0, "it began before the last look"


def test_number_served_is_known_if_all_gateways_report_it() -> None:
    """A gateway of an older version counts pairs, but not served requests."""
    before, new = DemandTotals(num_prefill_pairs=9), DemandTotals(num_prefill_pairs=9, num_served=3)
    for first, second, expected in ((new, new, 6), (new, before, None), (new, DemandTotals(), 3)):
        begun = [
            DemandRecord(gateway=GatewayId(name), totals={"m": totals}, lived_s=3.0)
            for name, totals in (("a", first), ("b", second))
        ]
        demand = grown((0.0, [word("c", 0)]), (5.0, [word("c", 0), *begun])).demand
        assert demand is not None and demand.num_served == expected


def test_a_silent_gateway_or_none_holds_and_nothing_is_lost() -> None:
    assert "no gateway" in grown((0.0, [])).problem
    delta = grown((0.0, [word("a", 100)]), (5.0, [word("a", 100, age_s=6.0)]))
    assert delta.demand is None and "gateway a has published nothing for 6 s" in delta.problem
    silent_and_not = grown((0.0, [word("a", 1, age_s=6.0, backlog=WAITING), word("b", 1, backlog=WAITING)]))
    assert silent_and_not.demand is None and silent_and_not.backlog == WAITING, "what b said counts"
    later = grown((0.0, [word("a", 1)]), (5.0, [word("a", 1, age_s=6.0)]), (10.0, [word("a", 9)]))
    assert later.demand is not None and (later.demand.seconds, later.demand.num_requests) == (10.0, 8)


def test_what_is_observed() -> None:
    workers = [
        worker("p", "prefill", num_jobs=3),
        worker("d1", "decode", num_jobs=4),
        worker("d2", "decode", "prefill", 5),
        worker("d3", "decode", draining=True),
        silent("d4", "decode"),
        worker("m", "mixed", num_jobs=2),
    ]
    delta = grown((0.0, [word("a", 1)]), (2.0, [word("a", 3, backlog=WAITING)]))
    seen = build_observation(2.0, delta.demand, delta.backlog, workers, {"decode": 2})
    assert (seen.prefill, seen.mixed) == (PoolState(1), PoolState(1))
    assert seen.decode == PoolState(num_serving=3, num_starting=2, num_draining=1)
    assert (seen.num_queued_tokens, seen.num_queued_requests, seen.num_running_seqs) == (40 + 5 * 7, 2, 4 + 5 + 2)
    assert seen.prefill_worker == seen.decode_worker == able(1.0)
    alone = build_observation(2.0, delta.demand, delta.backlog, [silent("p", "prefill"), worker("m", "mixed")], {})
    assert alone.prefill_worker == able(1.0), "a mixed one does both"


def test_too_few_answers_hold() -> None:
    assert problem_of([], may_sleep=False) == "no worker is registered" and problem_of([], may_sleep=True) == ""
    assert problem_of([worker("p", "prefill"), silent("d", "decode")], may_sleep=False) == ""
    for may_sleep in (True, False):
        workers = [worker("p", "prefill"), silent("d", "decode"), silent("e", "decode")]
        problem = problem_of(workers, may_sleep=may_sleep)
        assert "2 of 3 workers do not answer: d@h:1: unavailable" in problem


def test_each_pool_grows_and_shrinks_by_its_own_role() -> None:
    workers = [worker("p1", "prefill"), worker("p2", "decode", "prefill"), worker("d1", "decode")]
    assert pool_targets(ReplicaTarget(1, 2), workers, {}, {}) == {"prefill": 2, "decode": 1}
    assert pool_targets(ReplicaTarget(2, 4), workers, {}, {}) == {"prefill": 3, "decode": 3}
    assert pool_targets(ReplicaTarget(1, 1), workers, {}, {}) == {"prefill": 2, "decode": 0}, "its own pool's first"
    assert pool_targets(ReplicaTarget(1, 0), workers, {}, {}) == {"prefill": 1, "decode": 0}
    assert pool_targets(ReplicaTarget(1, 3), workers, {"decode": 1}, {}) == {"prefill": 2, "decode": 2}
    assert pool_targets(ReplicaTarget(1, 2), [*workers, worker("x", "decode", draining=True)], {}, {})["decode"] == 1


def test_who_changes_its_role() -> None:
    workers = [worker("a", "prefill", num_jobs=1), worker("b", "prefill", "decode", 9), worker("c", "prefill")]
    changes = [RoleChange("prefill", "decode", 2)]
    changed = chosen_for(changes, [*workers, worker("d", "prefill", draining=True), silent("e", "prefill")])
    assert {one.ref.id: role for one, role in changed.items()} == {"b": "decode", "c": "decode"}
    assert pool_targets(ReplicaTarget(1, 2), workers, {}, changed) == {"prefill": 2, "decode": 1}


def test_a_target_of_zero_is_none() -> None:
    slo = LatencyTargets.of(SloConfig(ttft_ms=500, itl_ms=0)).interactive
    assert (slo.ttft_s, slo.itl_s) == (0.5, None)


def test_records_survive_json() -> None:
    record: Any = word("a", 3, 0.0, WAITING)
    assert DemandRecord.from_json("a", record.to_json().encode(), 0.0) == record
    younger: Any = word("a", 3, 0.0, lived_s=2.5)
    assert DemandRecord.from_json("a", younger.to_json().encode(), 0.0) == younger
