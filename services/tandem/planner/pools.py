"""How many workers each pool has to have so that there are so many of each role; pure, and never starts one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.planner.worker_state import WorkerState
from tandem.scaling.decision import RoleChange, Target


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
    target: Target, workers: Sequence[WorkerState], starting: Mapping[str, int], changed: Mapping[WorkerState, str]
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
