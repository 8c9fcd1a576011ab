"""Composes what the scaler decides from, of what was seen; pure, and never decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.planner.demand_delta import DemandDeltaResult
from tandem.planner.worker_state import WorkerState, typical
from tandem.scaling.cluster_state import ClusterState, PoolState

ROLES = ("prefill", "decode", "mixed")


def build_observation(
    at: float, grown: DemandDeltaResult, workers: Sequence[WorkerState], starting: Mapping[str, int]
) -> ClusterState:
    """`workers` of one model; `starting`, by the role that they are started for, those that nobody has met yet."""
    pools = {role: _pool(role, workers, starting) for role in ROLES}
    mixed, prefill, decode = (typical(w for w in workers if w.role == role) for role in ("mixed", "prefill", "decode"))
    loads = [(worker, worker.load) for worker in workers if worker.load is not None]
    return ClusterState(
        at=at,
        demand=grown.demand,
        prefill=pools["prefill"],
        decode=pools["decode"],
        mixed=pools["mixed"],
        prefill_worker=prefill or mixed,
        decode_worker=decode or mixed,
        num_queued_tokens=grown.backlog.num_tokens + sum(load.num_queued_tokens for _, load in loads),
        num_queued_requests=grown.backlog.num_requests,
        num_running_seqs=sum(load.num_running for worker, load in loads if worker.role != "prefill"),
    )


def _pool(role: str, workers: Sequence[WorkerState], starting: Mapping[str, int]) -> PoolState:
    drains = Counter(worker.is_draining for worker in workers if worker.role == role)
    return PoolState(num_serving=drains[False], num_starting=starting.get(role, 0), num_draining=drains[True])


def problem_of(workers: Sequence[WorkerState]) -> str:
    """Why too little is known of them to decide anything; empty: enough is."""
    if not workers:
        return "no worker is registered"
    silent = [worker for worker in workers if worker.load is None]
    if 2 * len(silent) <= len(workers):
        return ""
    return f"{len(silent)} of {len(workers)} workers do not answer: {silent[0].ref}: {silent[0].problem}"
