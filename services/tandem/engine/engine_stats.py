"""Compute the load of a worker, as it is reported to routers."""

from __future__ import annotations

from tandem.core.worker_load import WorkerLoad
from tandem.kv.block_pool import BlockPool
from tandem.sched.scheduler import Scheduler


def load(scheduler: Scheduler, pool: BlockPool, draining: bool, num_remote_hit_tokens: int = 0) -> WorkerLoad:
    occupancy, speculation = scheduler.occupancy(), scheduler.speculation
    return WorkerLoad(
        num_running=occupancy.num_running,
        num_waiting=occupancy.num_waiting,
        num_queued_tokens=occupancy.backlog.tokens[-1],
        lane_tokens=occupancy.backlog.tokens,
        lane_longest=occupancy.backlog.longest,
        size_tokens=occupancy.backlog.size_tokens,
        size_longest=occupancy.backlog.size_longest,
        num_horizon_tokens=occupancy.backlog.num_horizon_tokens,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_leased_blocks=pool.num_leased,
        num_reserved_blocks=occupancy.num_reserved_blocks,
        draining=draining,
        num_drafted_tokens=0 if speculation is None else speculation.num_drafted,
        num_accepted_tokens=0 if speculation is None else speculation.num_accepted,
        num_steps_over_target=scheduler.pacer.num_steps_over_target,
        num_remote_hit_tokens=num_remote_hit_tokens,
        num_prefill_tokens=scheduler.pacer.num_prefill_tokens,
        num_decode_tokens=scheduler.pacer.num_decode_tokens,
    )
