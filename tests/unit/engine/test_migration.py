"""Test which blocks a migrating sequence offers, and when."""

from __future__ import annotations

from tandem.core.events import MigrationOffered
from tandem.core.ids import HandoffKey
from tandem.engine.kv_producer import KVProducer, Lease
from tandem.engine.migration import DrainMigration
from tandem.kv.block_pool import BlockPool
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tests.unit.sched.test_scheduler import add, finish, generate, step


class Migrating:
    """The only sequence of a worker, which another worker follows."""

    def __init__(self, block_size: int, num_prompt: int, max_tokens: int) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, digest_handoffs=False)
        self.pool = BlockPool(10, block_size)
        self.scheduler = Scheduler(self.pool, limits, "model")
        self.producer = KVProducer(self.pool, 10.0)
        self.migration = DrainMigration(self.scheduler.state, self.producer)
        add(self.scheduler, generate("a", num_prompt, max_tokens))
        step(self.scheduler)
        self.migration.has_begun = True
        (offered,) = self.migration.offer()
        assert isinstance(offered, MigrationOffered)
        self.key: HandoffKey = offered.offer
        self.migration.follow(self.key, 0.0)

    @property
    def lease(self) -> Lease:
        lease = self.producer.find(self.key)
        assert lease is not None
        return lease

    def step(self) -> None:
        plan = self.scheduler.plan().step
        assert plan is not None
        (update,) = finish(self.scheduler, plan)
        self.migration.computed(update)
        self.producer.check(set())


def test_without_digests_only_full_blocks_are_readable_while_the_sequence_decodes() -> None:
    one = Migrating(2, 3, 5)
    (first,) = one.lease.announcements
    assert first.num_computed == 3 and len(first.blocks) == 1 and not first.first_tokens
    one.migration.request_remainder(one.key, 0)
    one.step()
    last = one.lease.announcements[-1]
    assert last.num_computed == 4 and len(last.blocks) == 1 and len(last.first_tokens) == 2


def test_when_it_has_stopped_a_block_that_is_not_full_is_readable_and_one_that_is_empty_is_not() -> None:
    one = Migrating(4, 5, 9)
    one.migration.request_remainder(one.key, 1)
    (seq,) = one.scheduler.state.running
    # As after drafts that were wrong.
    assert one.pool.grow(seq.table, 3)
    one.step()
    last = one.lease.announcements[-1]
    assert (last.num_computed, len(last.blocks), len(last.first_tokens)) == (6, 1, 1)
