"""Test the targets of two bounded pools, also when decisions are repeated on their own results."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tandem.core.config import PlannerConfig
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.slo import Slo
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.planner.pool_targets import compute_targets, most_of
from tandem.scaling.cluster_state import Demand, WorkerCapacity
from tandem.scaling.decision import Decision, ReplicaTarget, RoleChange
from tandem.scaling.demand_totals import QueueBacklog
from tandem.scaling.scaler import Scaler, role_changes
from tandem.scaling.worker_state import WorkerState, build_observation

NONE: dict[str, int] = {}
ABLE = WorkerCapacity(
    cost=StepCost(0.01, 1e-4, 1e-4, 0.0, 0.0), num_blocks=20_000, block_size=64, max_num_seqs=256,
    max_num_batched_tokens=8192,
)  # fmt: skip
DEMAND = Demand(
    seconds=5.0,
    num_requests=1,
    num_input_tokens=100,
    num_cached_tokens=0,
    num_output_tokens=10,
    num_gaps=9,
    num_served=1,
)


def worker(name: str, pool: str, role: str, load: WorkerLoad | None = None) -> WorkerState:
    ref = WorkerRef(WorkerId(name), Incarnation(1), "h:1")
    return WorkerState(ref=ref, model="m", pool=pool, role=role, load=load or WorkerLoad(), capability=ABLE)


def decision(prefill: int, decode: int, changes: tuple[RoleChange, ...] = ()) -> Decision:
    target = ReplicaTarget(prefill, decode)
    return Decision(target=target, changes=changes, needed=target, forecast=None, reasons=())


def decided(workers: Sequence[WorkerState], target: tuple[int, int]) -> Decision:
    """Return the decision of a scaler that has required these numbers for a while."""
    current = ReplicaTarget(*roles(workers))
    spare = ReplicaTarget(*(max(0, now - then) for now, then in zip(current, target, strict=True)))
    return decision(*target, role_changes(current, ReplicaTarget(*target), spare))


REASSIGNED = [
    worker("p1", "prefill", "prefill"),
    worker("d1", "decode", "decode"),
    worker("d2", "decode", "decode"),
    worker("d3", "decode", "prefill"),
]
"""One of the decode pool's serves as prefill."""


def test_reassigned_workers_return_where_their_pool_is_full() -> None:
    found = compute_targets(decision(2, 3), REASSIGNED, NONE, {"prefill": 4, "decode": 3})
    assert found.replicas == {"prefill": 2, "decode": 3} and found.changed == {REASSIGNED[-1]: "decode"}
    assert compute_targets(decision(2, 3), REASSIGNED, NONE, {"decode": 3}) == found, "a pool without a bound has room"
    begun = compute_targets(decision(2, 3), REASSIGNED, {"prefill": 1}, {"prefill": 2, "decode": 3})
    assert begun == found, "who stands in is on the way already"
    roomy = compute_targets(decision(2, 3), REASSIGNED, NONE, {"prefill": 4, "decode": 4})
    assert roomy.replicas == {"prefill": 1, "decode": 4} and not roomy.changed
    assert compute_targets(decision(2, 3), REASSIGNED, NONE, NONE) == roomy


def test_nobody_goes_back_who_cannot_or_whom_nobody_stands_in_for() -> None:
    most = {"prefill": 4, "decode": 3}
    assert not compute_targets(decision(2, 3), REASSIGNED, NONE, {"prefill": 1, "decode": 3}).changed, (
        "prefill would be one short"
    )
    silent = [*REASSIGNED[:-1], replace(REASSIGNED[-1], load=None)]
    assert not compute_targets(decision(2, 3), silent, NONE, most).changed
    assert not compute_targets(decision(1, 3), REASSIGNED[1:], NONE, most).changed, "nobody else serves as prefill"
    busy, idle = worker("d4", "decode", "prefill", WorkerLoad(num_running=3)), worker("d5", "decode", "prefill")
    reassigned = [REASSIGNED[0], REASSIGNED[1], busy, idle]
    assert compute_targets(decision(3, 2), reassigned, NONE, most).changed == {idle: "decode"}, "no more than have to"
    assert compute_targets(decision(3, 3), reassigned, NONE, most).changed == {idle: "decode", busy: "decode"}
    assert compute_targets(decision(3, 3), reassigned[1:], NONE, most).changed == {idle: "decode"}, "one goes on"


def test_pools_are_bounded_where_roles_may_change() -> None:
    assert most_of(PlannerConfig(max_prefill=4)) == {"prefill": 4}
    assert most_of(PlannerConfig(max_prefill=4, max_decode=2)) == {"prefill": 4, "decode": 2}
    assert most_of(PlannerConfig(max_prefill=4, change_roles=False)) == {}


# ---- again and again


def roles(workers: Sequence[WorkerState]) -> tuple[int, int]:
    counts = Counter(worker.role for worker in workers)
    return counts["prefill"], counts["decode"]


def carried_out(
    workers: Sequence[WorkerState], of: Decision, most: Mapping[str, int], *, oldest_go: bool
) -> list[WorkerState]:
    """Apply a decision at once, as Serve and the registry do; Serve chooses which workers end."""
    replicas, changed = compute_targets(of, workers, NONE, most)
    after: list[WorkerState] = []
    for pool, number in replicas.items():
        bounded = max(1, min(number, most[pool]))
        there = [replace(one, role=changed.get(one, one.role)) for one in workers if one.pool == pool]
        names = (f"{pool}-{index}" for index in itertools.count())
        fresh = [name for name in itertools.islice(names, 20) if name not in {one.ref.id for one in there}]
        kept = there[max(0, len(there) - bounded) :] if oldest_go else there[:bounded]
        after += [*kept, *(worker(name, pool, pool) for name in fresh[: bounded - len(kept)])]
    return after


def test_who_decides_nothing_has_nobody_go_back() -> None:
    """Without a decision no worker returns, even where a pool exceeds a bound that was lowered while no gateway
    published."""
    fleet = [*REASSIGNED, worker("d4", "decode", "decode")]
    blind = decided(fleet, (2, 3))
    kept = compute_targets(replace(blind, held_back="no gateway speaks"), fleet, NONE, {"prefill": 4, "decode": 3})
    assert kept.changed == {} and kept.replicas == {"prefill": 1, "decode": 4}
    assert compute_targets(blind, fleet, NONE, {"prefill": 4, "decode": 3}).changed


@pytest.mark.parametrize("oldest_go", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_fleet_reaches_enough_of_each_role_and_stays(oldest_go: bool) -> None:
    """Check all fleets of two pools of one to three workers in either role, bounded as Serve bounds them too."""
    most = {"prefill": 3, "decode": 3}
    states = [(number, moved) for number in range(1, 4) for moved in range(number + 1)]
    for (prefill, away), (decode, reassigned), target in itertools.product(
        states, states, itertools.product(range(1, 4), range(1, 4))
    ):
        fleet = [
            *(worker(f"prefill-{i}", "prefill", "decode" if i < away else "prefill") for i in range(prefill)),
            *(worker(f"decode-{i}", "decode", "prefill" if i < reassigned else "decode") for i in range(decode)),
        ]
        case = f"{fleet} to {target}"
        for _ in range(3):
            fleet = carried_out(fleet, decided(fleet, target), most, oldest_go=oldest_go)
        # One too many stays where Serve ends none: fewer are taken from a role's own pool first.
        assert all(number >= least for number, least in zip(roles(fleet), target, strict=True)), case
        assert carried_out(fleet, decided(fleet, target), most, oldest_go=oldest_go) == fleet, case


def test_the_scaler_gets_its_target_from_a_full_pool() -> None:
    config = PlannerConfig(min_prefill=2, max_prefill=4, min_decode=3, max_decode=3)
    scaler = Scaler(config, Slo(1.5, 0.05))
    fleet = list(REASSIGNED)
    seen: list[tuple[int, int]] = []
    for number in range(1, 200):
        observed = build_observation(5.0 * number, DEMAND, QueueBacklog(), fleet, NONE)
        fleet = carried_out(fleet, scaler.decide(observed), most_of(config), oldest_go=True)
        seen.append(roles(fleet))
    assert set(seen) == {(2, 3)}, seen
