"""Test how a preempted sequence is handed over to another worker, and how it goes on where it is not taken."""

from __future__ import annotations

from tandem.core.errors import ErrorKind
from tandem.core.events import MigrationOffered
from tandem.core.ids import HandoffKey
from tandem.core.lane import Lane
from tandem.engine.effects import Effect
from tandem.engine.kv_producer import KVProducer
from tandem.engine.migration import Migrations
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import Announcement, BlockDigest
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import NO_DEMAND, BlockDemand, SchedulerLimits
from tandem.sched.state.sequence import MigrationState
from tests.unit.sched.lane_jobs import batch, urgent
from tests.unit.sched.test_scheduler import add, finish, names, step

SIZE = 2


class _Preempted:
    """A batch sequence with five output tokens that has yielded the only seat to an urgent one, and its offer."""

    def __init__(self, *, is_caching: bool = True) -> None:
        limits = SchedulerLimits(
            max_num_batched_tokens=32, max_num_seqs=1, max_model_len=64, max_lane_preemptions=1, digest_handoffs=False
        )
        self.pool = BlockPool(40, SIZE, enable_prefix_caching=is_caching)
        self.scheduler = Scheduler(self.pool, limits, "model")
        self.producer = KVProducer(self.pool, 10.0)
        self.migrations = Migrations(self.scheduler.state, self.producer)
        job = batch("b", num_prompt=4, max_tokens=20)
        add(self.scheduler, job)
        for _ in range(5):
            step(self.scheduler)
        add(self.scheduler, urgent("mine"))
        step(self.scheduler)
        self.seq = self.scheduler.state.by_key[job.key]
        (offered,) = self.migrations.offer(job.key, 0.0)
        assert isinstance(offered, MigrationOffered) and offered.is_requested
        self.key: HandoffKey = offered.offer

    def follow(self, num_known: int | None = 5) -> list[Effect]:
        """Let a consumer follow the offer and, once it has room, request the remainder, which it does not with
        None."""
        self.migrations.follow(self.key, 0.0)
        if num_known is None:
            return []
        return self.migrations.request_remainder(self.key, num_known, NO_DEMAND, 0.0)

    def step(self, *, is_digested: bool = True) -> list[str]:
        """Plan and finish a step with the digests that are due, and return the sequences in it."""
        plan = self.scheduler.plan(0.0, self.producer.blocks_to_digest()).step
        if plan is None:
            return []
        who = names(self.scheduler, plan)
        self.producer.on_planned(plan)
        for update in finish(self.scheduler, plan):
            if not update.has_ended:
                self.migrations.computed(update)
        digests = [BlockDigest(block, (index,)) for block, index in plan.digests]
        self.producer.on_digests(plan.number, digests if is_digested else (), 0.0)
        self.migrations.end_withdrawn()
        self.migrations.check()
        return who

    def run(self) -> list[str]:
        """Step until nothing can be planned, and return who was in the steps."""
        found: list[str] = []
        for _ in range(60):
            found += self.step()
        return found

    @property
    def announcements(self) -> list[Announcement]:
        lease = self.producer.find(self.key)
        return [] if lease is None else lease.announcements


def followed(*, is_caching: bool = True) -> _Preempted:
    one = _Preempted(is_caching=is_caching)
    one.follow()
    return one


def test_what_is_cached_is_offered_once_it_is_digested_and_it_does_not_start_meanwhile() -> None:
    one = followed()
    (first,) = one.announcements
    assert one.seq.migration_state is MigrationState.FROZEN
    assert first.is_migrating and not first.is_last and not first.blocks, "so that its consumer makes room"
    assert set(one.run()) == {"mine"}, "the seat is free in the end, and yet it does not start"
    blocks = [block for message in one.announcements for block in message.blocks]
    last = one.announcements[-1]
    assert len(blocks) == 4 and last.num_computed == 4 * SIZE, "of nine tokens, the last of which has no KV"
    assert last.is_last and last.first_tokens == ()
    assert one.pool.num_leased == 4


def test_it_starts_again_as_long_as_its_consumer_has_no_room() -> None:
    one = _Preempted()
    one.follow(num_known=None)
    assert one.run()[-1] == "b" and one.seq.migration_state is MigrationState.STREAMING
    assert sum(len(message.blocks) for message in one.announcements) > 4, "it migrates as it runs"


def test_tokens_that_its_consumer_does_not_know_keep_it_here() -> None:
    one = _Preempted()
    one.follow(num_known=4)
    assert one.producer.find(one.key) is None and not one.migrations.has(one.key)
    assert one.run()[-1] == "b" and one.seq.migration_state is MigrationState.NONE


def test_a_second_request_and_a_second_follower_change_nothing() -> None:
    one = followed()
    one.run()
    announcements = list(one.announcements)
    assert one.follow() == [] and one.announcements == announcements
    assert set(one.run()) <= {"mine"}


def test_it_can_be_cancelled_while_it_is_handed_over() -> None:
    one = followed()
    one.step()
    one.scheduler.cancel(one.seq.key)
    assert one.migrations.ended(one.seq.key, ErrorKind.CANCELLED, "cancelled", 1.0) == []
    one.producer.on_tick(99.0)
    assert set(one.run()) <= {"mine"} and one.pool.num_leased == 0


def test_where_leases_have_no_room_the_consumer_computes_all() -> None:
    one = _Preempted()
    one.migrations.follow(one.key, 0.0)
    demand = BlockDemand(num_running=0, num_reserved=40, largest_reservation=40)
    one.migrations.request_remainder(one.key, 5, demand, 0.0)
    assert one.announcements[-1].is_last and one.announcements[-1].num_computed == 0 and one.pool.num_leased == 0


def test_it_ends_here_when_it_was_taken_over() -> None:
    one = followed()
    one.run()
    assert one.migrations.released(one.key, 1.0, is_taken=True) == one.seq.key
    update = one.scheduler.release_migrated(one.seq.key)
    assert update.handed_over and one.pool.num_leased == 0 and not one.scheduler.num_sequences


def test_it_starts_again_when_it_was_not_taken_over_or_its_lease_runs_out() -> None:
    for is_expired in (False, True):
        one = followed()
        one.run()
        if is_expired:
            one.producer.on_tick(99.0)
            assert one.migrations.expired(one.key)
        else:
            assert one.migrations.released(one.key, 1.0, is_taken=False) is None
        assert set(one.run()) == {"b"} and one.pool.num_leased == 0


def test_it_starts_again_when_its_blocks_cannot_be_digested() -> None:
    one = followed()
    while one.producer.find(one.key) is not None:
        one.step(is_digested=False)
    assert one.producer.end_reason(one.key) is ErrorKind.KV_LOST
    assert "b" in one.run()


def test_where_nothing_is_cached_the_consumer_computes_all() -> None:
    one = followed(is_caching=False)
    _, message = one.announcements
    assert message.is_last and message.num_computed == 0 and message.blocks == ()
    assert one.migrations.released(one.key, 1.0, is_taken=True) == one.seq.key


def test_one_that_starts_before_it_is_followed_migrates_as_it_runs() -> None:
    one = _Preempted()
    one.scheduler.cancel(next(seq.key for seq in one.scheduler.state.running))
    assert one.step() == ["b"]
    one.follow(num_known=None)
    assert one.seq.migration_state is MigrationState.STREAMING and one.step() == ["b"]


def test_only_what_has_begun_is_offered() -> None:
    one = _Preempted()
    waiting = batch("c")
    add(one.scheduler, waiting)
    assert one.scheduler.state.by_key[waiting.key].lane is Lane.BATCH
    assert one.migrations.offer(waiting.key, 0.0) == []
    one.follow()
    assert one.migrations.offer(one.seq.key, 0.0) == [], "a consumer follows"


def test_a_draining_worker_requeues_it_unless_a_consumer_follows() -> None:
    for is_followed in (False, True):
        one = _Preempted()
        if is_followed:
            one.follow()
        one.migrations.begin_drain(0.0)
        assert (one.seq.key in one.migrations.not_worth_migrating()) is not is_followed
