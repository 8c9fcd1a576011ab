"""Build the scaler's input from what the planner has observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.planner.demand_delta import DemandDeltaResult
from tandem.planner.worker_state import WorkerState, typical
from tandem.scaling.cluster_state import ClusterState, PoolState

ROLES = ("prefill", "decode", "mixed")


def build_observation(
    at: float, delta: DemandDeltaResult, workers: Sequence[WorkerState], starting: Mapping[str, int]
) -> ClusterState:
    """Build the state of one model. `workers`: those of the model. `starting`: requested workers that have not
    registered yet, by the role for which they are started."""
    pools = {role: _pool(role, workers, starting) for role in ROLES}
    mixed, prefill, decode = (typical(w for w in workers if w.role == role) for role in ("mixed", "prefill", "decode"))
    loads = [(worker, worker.load) for worker in workers if worker.load is not None]
    return ClusterState(
        at=at,
        demand=delta.demand,
        prefill=pools["prefill"],
        decode=pools["decode"],
        mixed=pools["mixed"],
        prefill_worker=prefill or mixed,
        decode_worker=decode or mixed,
        num_queued_tokens=delta.backlog.num_tokens + sum(load.num_queued_tokens for _, load in loads),
        num_queued_requests=delta.backlog.num_requests,
        num_running_seqs=sum(load.num_running for worker, load in loads if worker.role != "prefill"),
    )


def _pool(role: str, workers: Sequence[WorkerState], starting: Mapping[str, int]) -> PoolState:
    drains = Counter(worker.is_draining for worker in workers if worker.role == role)
    return PoolState(num_serving=drains[False], num_starting=starting.get(role, 0), num_draining=drains[True])


def problem_of(workers: Sequence[WorkerState]) -> str:
    """Return why too little is known about the workers to decide anything; empty if enough is known."""
    if not workers:
        return "no worker is registered"
    silent = [worker for worker in workers if worker.load is None]
    if 2 * len(silent) <= len(workers):
        return ""
    return f"{len(silent)} of {len(workers)} workers do not answer: {silent[0].ref}: {silent[0].problem}"
