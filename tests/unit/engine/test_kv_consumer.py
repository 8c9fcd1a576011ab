"""Test KVConsumer event by event: leases, deadlines, reads that do not end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind
from tandem.core.events import JobEvent, SampledToken
from tandem.core.ids import (
    BlockHash,
    BlockId,
    HandoffId,
    HandoffKey,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerRef,
)
from tandem.core.request import GenerateJob, RemotePrefix, Request, ResumeJob, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.engine.effects import (
    ConsumerEffect,
    FollowHandoff,
    PullEnded,
    ReleaseHandoff,
    StartRead,
    TearDownPeer,
)
from tandem.engine.kv_consumer import KVConsumer
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.handoff import Announcement, BlockDigest, HandoffError, RemotePrefixRequest
from tandem.sched.state.limits import NO_DEMAND
from tandem.sched.state.schedule_result import PullAllocated

SOURCE = WorkerRef(WorkerId("p"), Incarnation(1), "p:1")
KEY = HandoffKey(HandoffId("h"), 1)
LOCAL = tuple(BlockId(b) for b in (10, 11, 12, 13))
TOKEN = SampledToken(5)
NAMES = tuple(BlockHash(bytes([number]) * 16) for number in range(1, 5))


def resume(name: str = "r", source: WorkerRef = SOURCE, handoff: HandoffId = KEY.handoff) -> ResumeJob:
    request = Request(id=RequestId(name), model="m", prompt_tokens=(1, 2, 3), sampling=SamplingParams(max_tokens=3))
    return ResumeJob(request=request, attempt=1, handoff=handoff, source=source)


JOB = resume()


def announcement(first: int, stop: int, token: SampledToken | None = None) -> Announcement:
    return Announcement(
        KEY,
        first,
        tuple(BlockDigest(BlockId(i), (i,)) for i in range(first, stop)),
        stop,
        () if token is None else (token,),
        7,
    )


class Consumer(KVConsumer):
    """A consumer whose next free blocks are LOCAL, and which forgets the events to gateways and the releases."""

    def __init__(self) -> None:
        self.pool = BlockPool(32, 1)
        self.tables = [BlockTable()]
        assert self.pool.grow(self.tables[0], 10)
        super().__init__(self.pool, HandoffConfig(lease_s=30.0, pull_timeout_s=20.0, drain_timeout_s=10.0))

    def granted(self, num_hits: int, num_known: int, now: float) -> list[ConsumerEffect]:
        table = BlockTable()
        self.tables.append(table)
        assert self.pool.grow(table, len(LOCAL))
        return without_messages(self.on_blocks(PullAllocated(JOB.key, table, num_hits, num_known), now))

    def announced(self, message: Announcement, now: float) -> list[ConsumerEffect]:
        return without_messages(self.on_announcement(message, (JOB.key,), now))

    def dropped(self, now: float) -> list[ConsumerEffect]:
        return without_messages(self.drop(JOB, ErrorKind.CANCELLED, "cancelled", now))

    def read_done(self, read: int, now: float) -> list[ConsumerEffect]:
        effects = without_messages(self.on_read_done(read, now))
        self.pool.check([*self.tables, *self.prefix_tables()], (), self.blocks())
        return effects

    def tick(self, now: float) -> list[ConsumerEffect]:
        self._next_renewal = 1000.0
        self.check({JOB.key, *(pull.job.key for pull in self)})
        return without_messages(self.on_tick(now))


def without_messages(effects: Iterable[ConsumerEffect]) -> list[ConsumerEffect]:
    return [x for x in effects if not isinstance(x, JobEvent | ReleaseHandoff | FollowHandoff)]


def opened(lease_until: float | None = 10.0) -> Consumer:
    book = Consumer()
    assert book.on_resume(JOB, 0.0) == [FollowHandoff(SOURCE, KEY)]
    if lease_until is not None:
        book.on_renewed((KEY,), lease_until - 10.0, 10.0)
    return book


def reading(lease_until: float | None = 10.0) -> tuple[Consumer, StartRead]:
    """Open a pull of three blocks, the first one a prefix hit, all of them announced at 1 s."""
    book = opened(lease_until)
    assert book.announced(announcement(0, 3, TOKEN), 1.0) == []
    return book, read_of(book.granted(1, 3, 1.0))


def read_of(effects: list[ConsumerEffect]) -> StartRead:
    (only,) = effects
    assert isinstance(only, StartRead)
    return only


def kinds(effects: list[ConsumerEffect]) -> list[str]:
    return [
        type(x).__name__ if not isinstance(x, PullEnded) else "arrived" if x.kind is None else "failed" for x in effects
    ]


def lost_kind(effects: list[ConsumerEffect]) -> ErrorKind:
    (lost,) = [x.kind for x in effects if isinstance(x, PullEnded)]
    assert lost is not None
    return lost


def test_a_pull_reads_what_it_lacks_and_arrives() -> None:
    book, read = reading()
    assert (read.positions, read.local) == ((1, 2), LOCAL[1:3]) and [o.block for o in read.offered] == [1, 2]
    assert list(book.blocks()) == list(LOCAL[1:3])
    (arrived,) = book.read_done(read.read, 4.0)
    assert isinstance(arrived, PullEnded) and arrived.kind is None and list(book.blocks()) == []
    assert arrived.first_tokens == (TOKEN,) and arrived.num_cached == 7
    times = arrived.times
    assert (times.num_cached_tokens, times.num_blocks) == (1, 2)
    assert (times.first_announced_at, times.last_announced_at, times.ready_at, times.busy_s) == (1.0, 1.0, 4.0, 3.0)
    assert len(book) == 0 and book.find(KEY) is None and list(book) == []


def test_chunks_are_read_as_announced_and_replays_are_skipped() -> None:
    book = opened()
    assert book.announced(announcement(0, 1), 1.0) == []
    assert kinds(book.granted(0, 3, 1.0)) == ["StartRead"]
    assert book.announced(announcement(0, 1), 1.5) == []
    assert read_of(book.announced(announcement(0, 3, TOKEN), 2.0)).local == LOCAL[1:3]
    assert book.announced(announcement(0, 3, TOKEN), 2.5) == []
    assert kinds(book.read_done(2, 3.0)) == []
    assert kinds(book.read_done(1, 4.0)) == ["arrived"]


def test_a_gap_between_announcements_ends_the_pull() -> None:
    book = opened()
    assert lost_kind(book.announced(announcement(1, 2), 1.0)) is ErrorKind.KV_LOST


@pytest.mark.parametrize(("now", "arrives"), [(9.9, True), (10.0, False), (10.1, False)])
def test_a_lease_ends_at_the_moment_at_which_the_producer_ends_it(now: float, arrives: bool) -> None:
    book, read = reading(10.0)
    assert kinds(book.read_done(read.read, now)) == [*["arrived"] * arrives]


def test_a_read_that_outlives_the_lease_waits_for_a_renewal() -> None:
    book, read = reading(10.0)
    assert kinds(book.read_done(read.read, 15.0)) == []
    assert book.tick(29.9) == []
    assert lost_kind(book.tick(30.0)) is ErrorKind.KV_LOST


def test_a_late_renewal_covers_the_time_before_it() -> None:
    book, read = reading(10.0)
    book.read_done(read.read, 15.0)
    book.on_renewed((KEY,), 9.0, 6.0)
    assert book.tick(16.0) == [], "granted up to the moment at which the read ended, not beyond it"
    book.on_renewed((KEY,), 12.0, 10.0)
    assert kinds(book.tick(25.0)) == ["arrived"]


def test_a_renewal_after_a_stall_longer_than_the_timeout_completes_the_pull() -> None:
    book, read = reading(10.0)
    book.read_done(read.read, 15.0)
    book.on_renewed((KEY,), 35.0, 10.0)
    assert book.next_deadline() == -math.inf and kinds(book.tick(36.0)) == ["arrived"]


@pytest.mark.parametrize(("now", "arrives"), [(14.9, True), (15.0, False)])
def test_a_renewal_counts_from_its_request_and_does_not_shorten(now: float, arrives: bool) -> None:
    book, read = reading(10.0)
    book.on_renewed((KEY,), 5.0, 10.0)
    book.on_renewed((KEY,), 4.0, 10.0)
    assert kinds(book.read_done(read.read, now)) == ["arrived"] * arrives


def test_kv_is_not_taken_before_the_source_has_confirmed_a_lease() -> None:
    book, read = reading(None)
    assert kinds(book.read_done(read.read, 2.0)) == []
    assert book.tick(2.5) == []
    book.on_renewed((KEY,), 0.5, 10.0)
    assert kinds(book.tick(3.0)) == ["arrived"]


def test_a_source_that_offers_too_little_is_not_waited_for() -> None:
    book = opened()
    book.announced(replace(announcement(0, 2, TOKEN), num_computed=3), 1.0)
    assert kinds(book.granted(0, 3, 1.0)) == ["StartRead"]
    assert kinds(book.read_done(1, 2.0)) == ["failed"]


@pytest.mark.parametrize(
    ("offered", "granted", "lease", "kind"),
    [
        (False, False, None, ErrorKind.KV_LOST),
        (True, False, 90.0, ErrorKind.OVERLOADED),
        (True, True, 90.0, ErrorKind.KV_LOST),
    ],
    ids=["no answer", "no room", "no bytes"],
)
def test_a_pull_without_progress_is_given_up(
    offered: bool, granted: bool, lease: float | None, kind: ErrorKind
) -> None:
    book = opened(lease)
    if offered:
        book.announced(announcement(0, 3, TOKEN), 0.0)
    if granted:
        book.granted(0, 3, 0.0)
    assert book.tick(19.9) == []
    assert lost_kind(book.tick(20.0)) is kind


def test_a_source_that_computes_is_waited_for_while_its_lease_lives() -> None:
    book = opened(10.0)
    for second in range(0, 60, 5):
        book.on_renewed((KEY,), second, 10.0)
        assert book.tick(second) == []
    assert book.tick(84.9) == []
    assert lost_kind(book.tick(85.0)) is ErrorKind.KV_LOST


def test_a_read_that_does_not_end_costs_the_peer_once() -> None:
    book, read = reading(90.0)
    assert kinds(book.dropped(2.0)) == ["failed"] and book.dropped(2.0) == []
    assert list(book.blocks()) == list(LOCAL[1:3])
    assert book.tick(11.9) == []
    assert book.tick(12.0) == [TearDownPeer(SOURCE, "a read does not end")] and book.tick(13.0) == []
    assert without_messages(book.on_peer_lost(SOURCE, "gone", proven=False, now=13.0)) == []
    assert book.num_quarantined == 2
    assert book.tick(99.0) == [] and list(book.blocks()) == list(LOCAL[1:3])
    assert without_messages(book.on_peer_lost(SOURCE, "gone", proven=True, now=99.0)) == []
    assert list(book.blocks()) == []
    assert book.num_quarantined == book.num_reads == 0
    assert book.read_done(read.read, 99.0) == []


def test_a_teardown_ends_every_pull_of_the_peer_and_no_other() -> None:
    book, _ = reading(90.0)
    elsewhere = WorkerRef(SOURCE.id, Incarnation(2), "p:2")
    book.on_resume(resume("other", handoff=HandoffId("other")), 2.0)
    book.on_resume(resume("new", elsewhere, HandoffId("new")), 2.0)
    book.dropped(2.0)
    outcomes = book.tick(12.0)
    assert kinds(outcomes) == ["TearDownPeer", "failed"]
    assert [pull.source for pull in book] == [elsewhere]


def test_a_failed_read_frees_its_blocks_only_when_drained() -> None:
    book, read = reading()
    assert kinds(without_messages(book.on_read_failed(read.read, "broken", drained=False, now=2.0))) == ["failed"]
    assert book.num_quarantined == 2
    assert kinds(without_messages(book.on_read_failed(read.read, "broken", drained=True, now=3.0))) == []


def test_blocks_are_granted_once() -> None:
    book, _ = reading()
    with pytest.raises(HandoffError):
        book.granted(1, 3, 2.0)


def test_one_handoff_is_not_pulled_twice() -> None:
    book = opened()
    with pytest.raises(AssertionError, match="is being pulled"):
        book.on_resume(resume("r2"), 0.0)


def test_remainder_of_a_migration_is_requested_once_one_block_is_missing() -> None:
    book = opened()
    moving = [
        replace(announcement(first, stop), is_migrating=True, num_computed=4)
        for first, stop in ((0, 0), (0, 2), (2, 4))
    ]
    assert book.announced(moving[0], 1.0) == [] and book.granted(0, 1, 1.0) == []
    assert kinds(book.announced(moving[1], 1.5)) == ["StartRead"]
    assert kinds(book.read_done(1, 2.0)) == [], "two are missing"
    assert kinds(book.announced(moving[2], 2.5)) == ["StartRead"]
    assert kinds(book.read_done(2, 3.0)) == ["SendRemainderRequest"]
    assert book.tick(3.5) == [], "it is asked for once"
    assert kinds(book.announced(moving[0], 4.0)) == ["SendRemainderRequest"], "a new stream repeats everything"
    last = replace(announcement(4, 4), is_migrating=True, num_computed=4, first_tokens=(TOKEN, TOKEN))
    assert kinds(book.announced(last, 5.0)) == ["arrived"]


def test_an_offer_of_fewer_tokens_than_are_known_is_read_as_far_as_it_goes() -> None:
    """Read what is offered; the KV of the other tokens is computed on this worker."""
    job = replace(JOB, request=replace(JOB.request, prompt_tokens=(1, 2)), output_tokens=(3,))
    book = Consumer()
    book.on_resume(job, 0.0)
    book.on_renewed((KEY,), 0.0, 10.0)
    assert book.announced(replace(announcement(0, 2, TOKEN), is_migrating=True), 1.0) == []
    assert len(read_of(book.granted(0, 3, 1.0)).local) == 2
    (arrived,) = book.read_done(1, 2.0)
    assert isinstance(arrived, PullEnded) and arrived.kind is None and arrived.num_computed == 2


# ---- remote prefix fetches


def test_the_last_announcement_of_a_preempted_sequence_may_offer_less_than_is_local_already() -> None:
    consumer = opened()
    consumer.announced(Announcement(KEY, 0, (), 0, is_migrating=True), 1.0)
    consumer.announced(replace(announcement(0, 1), is_migrating=True, is_last=True), 1.0)
    effects = consumer.granted(2, 4, 1.0)
    assert kinds(effects) == ["arrived"], "one block is offered, and two are here"
    (ended,) = effects
    assert isinstance(ended, PullEnded) and ended.first_tokens == () and ended.num_computed == 1


def fetching(num_hits: int = 1, lease_until: float | None = 10.0) -> Consumer:
    """Fetch a prefix of four blocks, of which `num_hits` are cached here: 2 s without progress, 8 s in all."""
    book = Consumer()
    table = BlockTable()
    assert book.pool.grow(table, num_hits)
    book.pool.publish(table, NAMES[:num_hits])
    book.pool.release(table)
    prefix = RemotePrefix(handoff=KEY.handoff, source=SOURCE, num_blocks=4)
    job = GenerateJob(request=JOB.request, attempt=1, prefix=prefix)
    effects = book.on_remote_prefix(job, NAMES, NO_DEMAND, StepCost(0.0, 4 / 3, 0.0, 0.0, 0.0), 0.0)
    assert effects == [FollowHandoff(SOURCE, KEY, RemotePrefixRequest(num_hits, NAMES))]
    if lease_until is not None:
        book.on_renewed((KEY,), 0.0, lease_until)
    return book


def served(first: int, stop: int, *, is_last: bool = False) -> Announcement:
    return replace(announcement(first, stop), is_last=is_last)


def over(effects: list[ConsumerEffect]) -> int:
    """Return how many leading blocks of the prefix are cached after a fetch that has ended."""
    (only,) = effects
    assert isinstance(only, PullEnded) and only.kind is None
    return only.times.num_cached_tokens + only.times.num_blocks


def test_a_prefix_fetch_is_read_as_announced_and_ends_with_the_last_announcement() -> None:
    book = fetching()
    first = read_of(book.announced(served(1, 2), 1.0))
    assert (first.positions, first.offered, first.local) == ((1,), (BlockDigest(BlockId(1), (1,)),), LOCAL[1:2])
    second = read_of(book.announced(served(2, 4, is_last=True), 1.5))
    # Reads end in any order.
    assert kinds(book.read_done(second.read, 2.0)) == []
    (end,) = book.read_done(first.read, 2.5)
    assert isinstance(end, PullEnded) and (end.times.num_cached_tokens, end.times.num_blocks) == (1, 3)
    assert end.times.busy_s == pytest.approx(1.5) and end.times.outcome == "done" and len(book) == 0
    assert book.pool.cached(NAMES) == LOCAL and book.num_prefix_tokens == 3


def test_a_source_may_have_fewer_blocks_than_requested() -> None:
    book = fetching()
    read = read_of(book.announced(served(1, 3, is_last=True), 1.0))
    assert over(book.read_done(read.read, 2.0)) == 3


def test_blocks_beyond_the_request_are_not_read() -> None:
    book = fetching()
    read = read_of(book.announced(served(1, 9, is_last=True), 1.0))
    assert len(read.offered) == len(read.local) == 3
    assert over(book.read_done(read.read, 2.0)) == 4


def test_of_a_prefix_fetch_that_is_given_up_the_leading_blocks_stay() -> None:
    book = fetching()
    first, second = (read_of(book.announced(served(i, i + 1), 1.0)) for i in (1, 2))
    book.read_done(first.read, 1.5)
    assert over(without_messages(book.on_source_lost(SOURCE, "gone", 1.6))) == 2
    assert kinds(book.read_done(second.read, 3.0)) == [], "its blocks wait for it"


@pytest.mark.parametrize("lease_until", [None, 1.5])
def test_of_a_prefix_fetch_without_a_lease_nothing_stays(lease_until: float | None) -> None:
    book = fetching(0, lease_until)
    read = read_of(book.announced(served(0, 4, is_last=True), 1.0))
    assert kinds(book.read_done(read.read, 1.6)) == []
    assert over(book.tick(4.0)) == 0


def test_a_prefix_fetch_without_progress_or_over_its_limit_is_given_up() -> None:
    book = fetching()
    assert book.next_deadline() == 2.0 and book.tick(1.9) == []
    assert over(book.tick(2.0)) == 1
    book = fetching()
    for i, at in ((1, 1.5), (2, 3.0), (3, 4.5)):
        book.read_done(read_of(book.announced(served(i, i + 1), at)).read, at)
    assert book.next_deadline() == 6.5
    book.announced(served(4, 4), 6.4)
    assert book.next_deadline() == 8.0 and book.tick(7.9) == [] and over(book.tick(8.0)) == 4


def test_a_prefix_fetch_repeated_on_a_new_stream_is_read_once() -> None:
    book = fetching()
    read = read_of(book.announced(served(1, 3), 1.0))
    assert book.announced(served(1, 3), 1.1) == []
    last = read_of(book.announced(served(1, 4, is_last=True), 1.2))
    assert last.positions == (3,)
    book.read_done(last.read, 1.3)
    assert over(book.read_done(read.read, 1.4)) == 4
