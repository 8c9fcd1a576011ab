"""How many workers each pool has to have so that there are so many of each role; pure, and never starts one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.planner.worker_state import WorkerState
from tandem.scaling.decision import Decision, ReplicaTarget, RoleChange


class PoolTargets(NamedTuple):
    """`replicas` by the role of a pool, and the new role of each worker that changes it."""

    replicas: dict[str, int]
    changed: dict[WorkerState, str]


def wanted(
    decision: Decision, workers: Sequence[WorkerState], starting: Mapping[str, int], most: Mapping[str, int]
) -> PoolTargets:
    """What a decision asks for. `most` workers that a pool may have; one that is missing may have any number."""
    changed = chosen_for(decision.changes, workers)
    replicas = pool_targets(decision.target, workers, starting, changed)
    back = {} if decision.is_held_back else _going_back(replicas, workers, changed, most)
    if back:
        changed |= back
        replicas = pool_targets(decision.target, workers, starting, changed)
    return PoolTargets(replicas, changed)


def chosen_for(changes: Sequence[RoleChange], workers: Sequence[WorkerState]) -> dict[WorkerState, str]:
    """The new role of each worker that changes it: those that go back to what they were started for, then those with
    the least to do. One that drains, or says nothing, does not."""
    found: dict[WorkerState, str] = {}
    for change in changes:
        able = [
            worker for worker in workers
            if worker.role == change.source and worker.load is not None
            and not worker.is_draining and worker not in found
        ]  # fmt: skip
        able.sort(key=lambda worker: (worker.pool != change.to, worker.num_jobs, worker.ref.id))
        found |= dict.fromkeys(able[: change.number], str(change.to))
    return found


def pool_targets(
    target: ReplicaTarget,
    workers: Sequence[WorkerState],
    starting: Mapping[str, int],
    changed: Mapping[WorkerState, str],
) -> dict[str, int]:
    """Workers by the role that their pool is started for. A worker that serves in another role than its pool's stays
    where it is: more of a role are started in its own pool, and fewer are taken from there first."""
    kept: Counter[tuple[str, str]] = Counter({(pool, pool): number for pool, number in starting.items() if number})
    for worker in workers:
        if not worker.is_draining:
            kept[changed.get(worker, worker.role), worker.pool] += 1
    pools = sorted({pool for _, pool in kept} | {"prefill", "decode"})
    for role, wanted in target._asdict().items():
        delta = wanted - sum(kept[role, pool] for pool in pools)
        kept[role, role] += max(0, delta)
        for pool in sorted(pools, key=lambda pool: (pool != role, pool)):
            taken = min(max(0, -delta), kept[role, pool])
            kept[role, pool] -= taken
            delta += taken
    return {pool: sum(number for (_, at), number in kept.items() if at == pool) for pool in pools}


def _going_back(
    replicas: Mapping[str, int],
    workers: Sequence[WorkerState],
    changed: Mapping[WorkerState, str],
    most: Mapping[str, int],
) -> dict[WorkerState, str]:
    """Those that a pool lent to the other role, where it would need more workers than it may have without them: as many
    as the other pool can start in their stead. One goes on to serve in that role until then."""
    found: dict[WorkerState, str] = {}
    for pool, other in (("prefill", "decode"), ("decode", "prefill")):
        excess = replicas[pool] - most.get(pool, replicas[pool])
        room = most.get(other, replicas[other] + excess) - replicas[other]
        serving = [
            worker for worker in workers
            if worker.role == other and worker.load is not None and not worker.is_draining and worker not in changed
        ]  # fmt: skip
        lent = [worker for worker in serving if worker.pool == pool]
        lent.sort(key=lambda worker: (worker.num_jobs, worker.ref.id))
        found |= dict.fromkeys(lent[: max(0, min(excess, room, len(serving) - 1))], pool)
    return found
