"""Test which blocks a migrating sequence offers, and when."""

from __future__ import annotations

from tandem.core.events import MigrationOffered
from tandem.core.ids import HandoffKey, JobKey, RequestId
from tandem.engine.kv_producer import KVProducer, Lease
from tandem.engine.migration import Migrations
from tandem.kv.block_pool import BlockPool
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import NO_DEMAND, SchedulerLimits
from tests.unit.sched.test_scheduler import add, finish, generate, step


def worker(block_size: int = 4) -> tuple[Scheduler, KVProducer, Migrations]:
    """The parts of a worker that runs one sequence at a time."""
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=1, max_model_len=64, digest_handoffs=False)
    scheduler = Scheduler(BlockPool(10, block_size), limits, "model")
    producer = KVProducer(scheduler.state.pool, 10.0)
    return scheduler, producer, Migrations(scheduler.state, producer)


class Migrating:
    """The only sequence of a worker, which another worker follows."""

    def __init__(self, block_size: int, num_prompt: int, max_tokens: int) -> None:
        self.scheduler, self.producer, self.migration = worker(block_size)
        add(self.scheduler, generate("a", num_prompt, max_tokens))
        step(self.scheduler)
        self.migration.begin_drain(0.0)
        (offered,) = self.migration.offer_all()
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
    one.migration.request_remainder(one.key, 0, NO_DEMAND, 0.0)
    one.step()
    last = one.lease.announcements[-1]
    assert last.num_computed == 4 and len(last.blocks) == 1 and len(last.first_tokens) == 2


def test_when_it_has_stopped_a_block_that_is_not_full_is_readable_and_one_that_is_empty_is_not() -> None:
    one = Migrating(4, 5, 9)
    one.migration.request_remainder(one.key, 1, NO_DEMAND, 0.0)
    (seq,) = one.scheduler.state.running
    # As after drafts that were wrong.
    assert one.scheduler.state.pool.grow(seq.table, 3)
    one.step()
    last = one.lease.announcements[-1]
    assert (last.num_computed, len(last.blocks), len(last.first_tokens)) == (6, 1, 1)


def test_a_requested_offer_that_no_consumer_follows_is_replaced() -> None:
    """The gateway that asks again, or a drain, does not know of it."""
    scheduler, producer, migrations = worker()
    running, waiting = jobs = [generate(name, 3, 9) for name in ("a", "b")]
    add(scheduler, *jobs)
    step(scheduler)
    assert migrations.offer(waiting.key, 0.0) == migrations.offer(JobKey(RequestId("unknown"), 1), 0.0) == []
    (first,) = migrations.offer(running.key, 0.0)
    (second,) = migrations.offer(running.key, 1.0)
    assert migrations.offer_all() == [] and not migrations.is_due, "it does not drain"
    migrations.begin_drain(2.0)
    (third,) = migrations.offer_all()
    offers = [each for each in (first, second, third) if isinstance(each, MigrationOffered)]
    assert [(each.key, each.is_requested) for each in offers] == [
        (running.key, is_due) for is_due in (True, True, False)
    ]
    assert len({each.offer for each in offers}) == 3
    assert [producer.end_reason(each.offer) is None for each in offers] == [False, False, True]
    assert migrations.offer(running.key, 2.5) == [], "a drain has offered it"
    migrations.check()


def test_an_offer_that_a_consumer_follows_is_not_replaced() -> None:
    scheduler, _, migrations = worker()
    job = generate("a", 3, 9)
    add(scheduler, job)
    step(scheduler)
    (offered,) = migrations.offer(job.key, 0.0)
    assert isinstance(offered, MigrationOffered)
    migrations.follow(offered.offer, 1.0)
    assert migrations.offer(job.key, 2.0) == []
    migrations.begin_drain(3.0)
    assert migrations.offer_all() == []
