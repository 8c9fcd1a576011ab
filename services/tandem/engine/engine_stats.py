"""Compute an engine's load, statistics and transfer reports from its parts, and check its block accounting."""

from __future__ import annotations

from tandem.core.events import KVReceived
from tandem.core.ids import JobKey, WorkerRef
from tandem.core.request import Job, ResumeJob
from tandem.core.worker_load import EngineStats, WorkerLoad
from tandem.engine.job_timings import PullEnd, PullTimes
from tandem.engine.kv_producer import KVProducer
from tandem.kv.block_pool import BlockPool
from tandem.kv.kv_consumer import PullTable
from tandem.kv.pull_actions import PullStats
from tandem.sched.scheduler import Scheduler


def load(scheduler: Scheduler, pool: BlockPool, draining: bool) -> WorkerLoad:
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
        num_remote_hit_tokens=scheduler.remote_prefixes.num_tokens,
        num_prefill_tokens=scheduler.pacer.num_prefill_tokens,
        num_decode_tokens=scheduler.pacer.num_decode_tokens,
    )


def engine_stats(pool: BlockPool, scheduler: Scheduler, producer: KVProducer, pulls: PullTable) -> EngineStats:
    return EngineStats(
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_table_blocks=sum(len(table) for table in scheduler.tables()),
        num_leased_blocks=pool.num_leased,
        num_reading_blocks=pool.num_reading,
        num_quarantined_blocks=pulls.num_quarantined,
        num_sequences=scheduler.num_sequences,
        num_leases=len(producer),
        num_pulls=len(pulls),
        num_host_blocks=pool.host.num_held,
    )


def check_blocks(pool: BlockPool, scheduler: Scheduler, producer: KVProducer, pulls: PullTable) -> None:
    """Recount the holders of each block from their owners, and raise AssertionError naming the first difference."""
    scheduler.check()
    copied, pinned = scheduler.copied_blocks(), scheduler.copied_slots()
    pool.check(scheduler.tables(), producer.blocks(), pulls.blocks(), copied, pinned)


def pulled_event(
    key: JobKey, stats: PullStats, block_size: int, block_bytes: int, source: WorkerRef | None = None
) -> KVReceived:
    """Build the event of a finished pull. `source`: the worker whose cached prefix was read; None for the KV of a
    Resume."""
    return KVReceived(
        key=key,
        num_blocks=stats.num_blocks,
        num_bytes=stats.num_blocks * block_bytes,
        num_cached_tokens=stats.num_hit_blocks * block_size,
        num_exposed_bytes=stats.num_exposed_blocks * block_bytes,
        total_s=stats.total_s,
        exposed_s=stats.exposed_s,
        busy_s=stats.busy_s,
        source=source,
    )


def pull_times(
    job: Job, source: WorkerRef, stats: PullStats, now: float, block_bytes: int, outcome: PullEnd
) -> PullTimes:
    """Build the timings of a pull that ends at `now`."""
    return PullTimes(
        kind="handoff" if isinstance(job, ResumeJob) else "prefix",
        outcome=outcome,
        source=source,
        num_blocks=stats.num_blocks,
        num_bytes=stats.num_blocks * block_bytes,
        num_exposed_bytes=min(stats.num_exposed_blocks, stats.num_blocks) * block_bytes,
        first_announced_at=now - stats.total_s,
        last_announced_at=max(now - stats.total_s, now - stats.exposed_s),
        ready_at=now,
        busy_s=stats.busy_s,
    )
