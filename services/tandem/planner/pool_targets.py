"""Compute how many workers each pool must have so that each role has its target number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.core.config import PlannerConfig
from tandem.scaling.decision import Decision, ReplicaTarget, RoleChange
from tandem.scaling.worker_state import WorkerState


class PoolTargets(NamedTuple):
    """Describe what a decision requires of the actuator.

    `replicas`: number of workers of each pool, by the role for which the pool is started. `changed`: the new role of
    each worker whose role changes."""

    replicas: dict[str, int]
    changed: dict[WorkerState, str]


def most_of(planner: PlannerConfig) -> dict[str, int]:
    """Return the largest number of workers of each pool that has a bound, by the role of the pool.

    The bounds are the settings `planner.max_prefill` and `planner.max_decode`; a pool without one is missing. The
    result is empty where `planner.change_roles` is off: these bounds only limit how many workers return from another
    role to the role of their pool."""
    most = {"prefill": planner.max_prefill, "decode": planner.max_decode} if planner.change_roles else {}
    return {pool: number for pool, number in most.items() if number}


def compute_targets(
    decision: Decision, workers: Sequence[WorkerState], starting: Mapping[str, int], most: Mapping[str, int]
) -> PoolTargets:
    """Compute the numbers of workers by pool, and the role changes, that a decision requires.

    `decision`: number of workers that each role should have, and the role changes. `workers`: registered workers of the
    model. `starting`: number of requested workers that have not registered yet, by the role of their pool. `most`:
    largest number of workers by pool; a pool that is missing is unbounded."""
    changed = chosen_for(decision.changes, workers)
    replicas = pool_targets(decision.target, workers, starting, changed)
    returning = {} if decision.held_back else _returning(replicas, workers, changed, most)
    if returning:
        changed |= returning
        replicas = pool_targets(decision.target, workers, starting, changed)
    return PoolTargets(replicas, changed)


def chosen_for(changes: Sequence[RoleChange], workers: Sequence[WorkerState]) -> dict[WorkerState, str]:
    """Choose the workers that change their role, and return the new role of each.

    `changes`: how many workers change from one role to another. `workers`: registered workers of the model. Workers
    that return to the role of their pool are chosen first, then those with the fewest jobs. Draining workers and
    workers that do not answer keep their role, so fewer may be chosen than `changes` require."""
    found: dict[WorkerState, str] = {}
    for change in changes:
        candidates = _serving(workers, change.source, found)
        candidates.sort(key=lambda worker: (worker.pool != change.to, worker.num_jobs, worker.ref.id))
        found |= dict.fromkeys(candidates[: change.number], str(change.to))
    return found


def pool_targets(
    target: ReplicaTarget,
    workers: Sequence[WorkerState],
    starting: Mapping[str, int],
    changed: Mapping[WorkerState, str],
) -> dict[str, int]:
    """Return how many workers each pool must have so that each role has its target number, by pool.

    A pool is named by the role for which it is started. `target`: number of workers by role. `starting`: number of
    requested workers that have not registered yet, by pool. `changed`: new role of each worker whose role changes. A
    worker that serves in another role than its pool's stays in its pool. If a role needs more workers, they are added
    to the pool of this role. If it needs fewer, workers of this pool are removed first, then workers of other pools
    that serve in the role."""
    kept: Counter[tuple[str, str]] = Counter({(pool, pool): number for pool, number in starting.items() if number})
    for worker in workers:
        if not worker.is_draining:
            kept[changed.get(worker, worker.role), worker.pool] += 1
    pools = sorted({pool for _, pool in kept} | {"prefill", "decode"})
    for role, desired in target._asdict().items():
        delta = desired - sum(kept[role, pool] for pool in pools)
        kept[role, role] += max(0, delta)
        for pool in sorted(pools, key=lambda pool: (pool != role, pool)):
            taken = min(max(0, -delta), kept[role, pool])
            kept[role, pool] -= taken
            delta += taken
    return {pool: sum(number for (_, at), number in kept.items() if at == pool) for pool in pools}


def _returning(
    replicas: Mapping[str, int],
    workers: Sequence[WorkerState],
    changed: Mapping[WorkerState, str],
    most: Mapping[str, int],
) -> dict[WorkerState, str]:
    """Choose the workers that return to the role of their pool, where the pool would otherwise exceed its bound.

    As many return as the other pool can start in their place. At least one worker keeps serving in the other role until
    then.
    """
    found: dict[WorkerState, str] = {}
    for pool, other in (("prefill", "decode"), ("decode", "prefill")):
        excess = replicas[pool] - most.get(pool, replicas[pool])
        room = most.get(other, replicas[other] + excess) - replicas[other]
        serving = _serving(workers, other, changed)
        reassigned = [worker for worker in serving if worker.pool == pool]
        reassigned.sort(key=lambda worker: (worker.num_jobs, worker.ref.id))
        found |= dict.fromkeys(reassigned[: max(0, min(excess, room, len(serving) - 1))], pool)
    return found


def _serving(workers: Sequence[WorkerState], role: str, changed: Mapping[WorkerState, str]) -> list[WorkerState]:
    """Return the workers that answer and serve in `role`, without those that drain or whose role changes."""
    answering = [worker for worker in workers if worker.role == role and worker.load is not None]
    return [worker for worker in answering if not worker.is_draining and worker not in changed]
