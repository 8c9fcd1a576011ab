"""Define what an autoscaler knows about one worker, and summarize the cluster for a scaling decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.config import EngineConfig, WorkerConfig
from tandem.core.ids import WorkerRef
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.core.worker_load import HORIZON_STEPS, WorkerLoad
from tandem.scaling.cluster_state import ClusterState, Demand, PoolState, WorkerCapacity
from tandem.scaling.demand_totals import QueueBacklog

_TYPICAL = StepFeatures(num_prefill_tokens=256, num_decode_seqs=8, decode_context=8192, num_prefill_pairs=131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """Describe what an autoscaler knows about one worker.

    `pool`: role for which it was started. `role`: role in which routers use it now. `load`: running and waiting work as
    the worker reports it; None if it did not answer, for the reason in `problem`. `capability`: its measured step times
    and its limits; None if it did not answer or has not measured its step times yet. `hosts`: host names or addresses
    of the machines of its ranks, the first rank's first; empty if it did not answer."""

    ref: WorkerRef
    model: str
    pool: str
    role: str
    load: WorkerLoad | None = None
    capability: WorkerCapacity | None = None
    problem: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def is_draining(self) -> bool:
        """Return whether the worker has reported that it drains; False for a worker that does not answer."""
        return self.load is not None and self.load.draining

    @property
    def num_jobs(self) -> int:
        return 0 if self.load is None else self.load.num_running + self.load.num_waiting


def typical(workers: Iterable[WorkerState]) -> WorkerCapacity | None:
    """Return the capacity of the worker with the median step time; None if no worker has reported a capacity.

    Workers are ordered by the time that they are predicted to take for a typical step.
    """
    capacities = [worker.capability for worker in workers if worker.capability is not None]
    capacities.sort(key=lambda capability: capability.cost.predict(_TYPICAL))
    return capacities[len(capacities) // 2] if capacities else None


def capacity_of(
    cost: StepCost | None, load: WorkerLoad, block_size: int, engine: EngineConfig, worker: WorkerConfig
) -> WorkerCapacity | None:
    """Return the capacity of a worker that runs with the settings `engine` and `worker`.

    `cost`: its measured step times, None while unknown. `load`: its last report. `block_size`: tokens of a KV block, 0
    while unknown. Returns None until step times, number of blocks and block size are known.

    The most tokens of a step are derived from the queue limit that the worker reports in `load`, unless the setting
    `worker.queue_horizon_ms` determines that limit; then they are `engine.max_num_batched_tokens`."""
    if cost is None or not load.num_blocks or not block_size:
        return None
    tokens_per_step = 0 if worker.queue_horizon_ms > 0 else load.num_horizon_tokens // HORIZON_STEPS
    return WorkerCapacity(
        cost=cost,
        num_blocks=load.num_blocks,
        block_size=block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=tokens_per_step or engine.max_num_batched_tokens,
    )


def build_observation(
    at: float,
    demand: Demand | None,
    backlog: QueueBacklog,
    workers: Sequence[WorkerState],
    starting: Mapping[str, int],
) -> ClusterState:
    """Build the state of the cluster for one model, the input of a scaling decision.

    `at`: seconds of a monotonic clock. `demand`: what was counted since the previous observation; None: no gateway has
    reported. `backlog`: requests that wait at the gateways. `workers`: registered workers of the model. `starting`:
    number of workers that were requested and have not registered yet, by the role of their pool.
    """
    mixed, prefill, decode = (typical(w for w in workers if w.role == role) for role in ("mixed", "prefill", "decode"))
    loads = [(worker, worker.load) for worker in workers if worker.load is not None]
    return ClusterState(
        at=at,
        demand=demand,
        prefill=_pool("prefill", workers, starting),
        decode=_pool("decode", workers, starting),
        mixed=_pool("mixed", workers, starting),
        prefill_worker=prefill or mixed,
        decode_worker=decode or mixed,
        num_queued_tokens=backlog.num_tokens + sum(load.num_queued_tokens for _, load in loads),
        num_queued_requests=backlog.num_requests,
        num_running_seqs=sum(load.num_running for worker, load in loads if worker.role != "prefill"),
    )


def _pool(role: str, workers: Sequence[WorkerState], starting: Mapping[str, int]) -> PoolState:
    drains = Counter(worker.is_draining for worker in workers if worker.role == role)
    return PoolState(num_serving=drains[False], num_starting=starting.get(role, 0), num_draining=drains[True])
