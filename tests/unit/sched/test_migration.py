"""Test which blocks a migrating sequence offers, and when."""

from __future__ import annotations

from tandem.kv.block_pool import BlockPool
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.transfer.migration import MigrationTracker
from tests.unit.sched.test_scheduler import add, generate, step


def test_without_digests_only_full_blocks_are_readable_while_the_sequence_decodes() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, digest_handoffs=False)
    scheduler = Scheduler(BlockPool(10, 2), limits, "model")
    migrations: MigrationTracker = scheduler.migrations
    add(scheduler, generate("a", 3, 5))
    step(scheduler)
    (key,) = migrations.movable()
    progress = migrations.start(key)
    assert progress.num_computed == 3 and len(progress.fresh) == 1 and not progress.has_stopped
    migrations.finalize(key)
    step(scheduler)
    stopped = migrations.progress(key, 1, ())
    assert stopped.has_stopped and stopped.num_computed == 4 and len(stopped.fresh) == 1


def test_when_it_has_stopped_a_block_that_is_not_full_is_readable_and_one_that_is_empty_is_not() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, digest_handoffs=False)
    pool = BlockPool(10, 4)
    scheduler = Scheduler(pool, limits, "model")
    migrations = scheduler.migrations
    add(scheduler, generate("a", 5, 9))
    step(scheduler)
    (key,) = migrations.movable()
    migrations.start(key)
    migrations.finalize(key)
    step(scheduler)
    # As after drafts that were wrong.
    assert pool.grow(scheduler.state.by_key[key].table, 3)
    progress = migrations.progress(key, 1, ())
    assert (progress.has_stopped, progress.num_computed, len(progress.fresh)) == (True, 6, 1)
