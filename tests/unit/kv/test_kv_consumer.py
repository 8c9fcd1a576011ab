"""Test PullTable event by event: leases, deadlines, reads that do not end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffId, HandoffKey, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.kv.handoff import Announcement, BlockDigest, HandoffError
from tandem.kv.kv_consumer import PullTable
from tandem.kv.pull import PrefixFetchTerms
from tandem.kv.pull_actions import (
    KVComplete,
    PrefixFetchDone,
    PullFailed,
    PullOutcome,
    ReadEnded,
    StartRead,
    TearDownProducer,
)

SOURCE = WorkerRef(WorkerId("p"), Incarnation(1), "p:1")
KEY = HandoffKey(HandoffId("h"), 1)
JOB = JobKey(RequestId("r"), 1)
LOCAL = tuple(BlockId(b) for b in (10, 11, 12, 13))
TOKEN = SampledToken(5)


def announcement(first: int, stop: int, token: SampledToken | None = None) -> Announcement:
    return Announcement(
        KEY,
        first,
        tuple(BlockDigest(BlockId(i), (i,)) for i in range(first, stop)),
        stop,
        () if token is None else (token,),
        7,
    )


def opened(lease_until: float | None = 10.0) -> PullTable:
    book = PullTable(pull_timeout_s=20.0, drain_timeout_s=10.0)
    book.open(KEY, JOB, SOURCE, 0.0)
    if lease_until is not None:
        book.renewed((KEY,), lease_until - 10.0, 10.0)
    return book


def reading(lease_until: float | None = 10.0) -> tuple[PullTable, StartRead]:
    """Open a pull of three blocks, the first one a prefix hit, all of them announced at 1 s."""
    book = opened(lease_until)
    assert book.announced(announcement(0, 3, TOKEN), 1.0) == []
    (read,) = book.granted(JOB, LOCAL, 1, 3, 1.0)
    assert isinstance(read, StartRead)
    return book, read


def kinds(outcomes: list[PullOutcome]) -> list[str]:
    return [type(x).__name__ for x in outcomes]


def lost_kind(outcomes: list[PullOutcome]) -> ErrorKind:
    (lost,) = [x for x in outcomes if isinstance(x, PullFailed)]
    return lost.kind


def test_a_pull_reads_what_it_lacks_and_arrives() -> None:
    book, read = reading()
    assert read.first_index == 1 and read.local == LOCAL[1:3] and [o.block for o in read.offered] == [1, 2]
    ended, arrived = book.read_done(read.read, 4.0)
    assert ended == ReadEnded(LOCAL[1:3]) and isinstance(arrived, KVComplete)
    assert arrived.first_tokens == (TOKEN,) and arrived.num_cached == 7
    assert (arrived.stats.num_hit_blocks, arrived.stats.num_blocks) == (1, 2)
    assert (arrived.stats.total_s, arrived.stats.exposed_s, arrived.stats.busy_s) == (3.0, 3.0, 3.0)
    assert len(book) == 0 and book.find(KEY) is None and book.of_job(JOB) is None


def test_chunks_are_read_as_announced_and_replays_are_skipped() -> None:
    book = opened()
    assert book.announced(announcement(0, 1), 1.0) == []
    assert kinds(book.granted(JOB, LOCAL, 0, 3, 1.0)) == ["StartRead"]
    assert book.announced(announcement(0, 1), 1.5) == []
    (second,) = book.announced(announcement(0, 3, TOKEN), 2.0)
    assert isinstance(second, StartRead) and second.local == LOCAL[1:3]
    assert book.announced(announcement(0, 3, TOKEN), 2.5) == []
    assert kinds(book.read_done(2, 3.0)) == ["ReadEnded"]
    assert kinds(book.read_done(1, 4.0)) == ["ReadEnded", "KVComplete"]


def test_a_gap_between_announcements_ends_the_pull() -> None:
    book = opened()
    assert lost_kind(book.announced(announcement(1, 2), 1.0)) is ErrorKind.KV_LOST


@pytest.mark.parametrize(("now", "arrives"), [(9.9, True), (10.0, False), (10.1, False)])
def test_a_lease_ends_at_the_moment_at_which_the_producer_ends_it(now: float, arrives: bool) -> None:
    book, read = reading(10.0)
    assert kinds(book.read_done(read.read, now)) == ["ReadEnded", *["KVComplete"] * arrives]


def test_a_read_that_outlives_the_lease_waits_for_a_renewal() -> None:
    book, read = reading(10.0)
    assert kinds(book.read_done(read.read, 15.0)) == ["ReadEnded"]
    assert book.tick(29.9) == []
    assert lost_kind(book.tick(30.0)) is ErrorKind.KV_LOST


def test_a_late_renewal_covers_the_time_before_it() -> None:
    book, read = reading(10.0)
    book.read_done(read.read, 15.0)
    book.renewed((KEY,), 9.0, 6.0)
    assert book.tick(16.0) == [], "granted up to the moment at which the read ended, not beyond it"
    book.renewed((KEY,), 12.0, 10.0)
    assert kinds(book.tick(25.0)) == ["KVComplete"]


def test_a_renewal_counts_from_its_request_and_does_not_shorten() -> None:
    book, read = reading(10.0)
    book.renewed((KEY,), 5.0, 10.0)
    book.renewed((KEY,), 4.0, 10.0)
    assert kinds(book.read_done(read.read, 14.9)) == ["ReadEnded", "KVComplete"]


def test_a_renewal_does_not_count_from_its_answer() -> None:
    book, read = reading(10.0)
    book.renewed((KEY,), 5.0, 10.0)
    assert kinds(book.read_done(read.read, 15.0)) == ["ReadEnded"]


def test_kv_is_not_taken_before_the_source_has_confirmed_a_lease() -> None:
    book, read = reading(None)
    assert kinds(book.read_done(read.read, 2.0)) == ["ReadEnded"]
    assert book.tick(2.5) == []
    book.renewed((KEY,), 0.5, 10.0)
    assert kinds(book.tick(3.0)) == ["KVComplete"]


def test_a_source_that_offers_too_little_is_not_waited_for() -> None:
    book = opened()
    book.announced(replace(announcement(0, 2, TOKEN), num_computed=3), 1.0)
    assert kinds(book.granted(JOB, LOCAL, 0, 3, 1.0)) == ["StartRead"]
    assert kinds(book.read_done(1, 2.0)) == ["ReadEnded", "PullFailed"]


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
        book.granted(JOB, LOCAL, 0, 3, 0.0)
    assert book.tick(19.9) == []
    assert lost_kind(book.tick(20.0)) is kind


def test_a_source_that_computes_is_waited_for_while_its_lease_lives() -> None:
    book = opened(10.0)
    for second in range(0, 60, 5):
        book.renewed((KEY,), second, 10.0)
        assert book.tick(second) == []
    assert book.tick(84.9) == []
    assert lost_kind(book.tick(85.0)) is ErrorKind.KV_LOST


def test_a_read_that_does_not_end_costs_the_peer_once() -> None:
    book, read = reading(90.0)
    assert kinds(book.abandon(JOB, ErrorKind.CANCELLED, "cancelled", 2.0)) == ["PullFailed"]
    assert book.abandon(JOB, ErrorKind.CANCELLED, "cancelled", 2.0) == []
    assert list(book.blocks()) == list(LOCAL[1:3])
    assert book.tick(11.9) == []
    assert book.tick(12.0) == [TearDownProducer(SOURCE)] and book.tick(13.0) == []
    assert book.peer_lost(SOURCE, "gone", proven=False, now=13.0) == [] and book.num_quarantined == 2
    assert book.tick(99.0) == [] and list(book.blocks()) == list(LOCAL[1:3])
    assert book.peer_lost(SOURCE, "gone", proven=True, now=99.0) == [ReadEnded(LOCAL[1:3])]
    assert book.num_quarantined == book.num_reads == 0
    assert book.read_done(read.read, 99.0) == []


def test_a_teardown_ends_every_pull_of_the_peer_and_no_other() -> None:
    book, _ = reading(90.0)
    other = HandoffKey(HandoffId("other"), 1)
    elsewhere = WorkerRef(SOURCE.id, Incarnation(2), "p:2")
    book.open(other, JobKey(RequestId("other"), 1), SOURCE, 2.0)
    book.open(HandoffKey(HandoffId("new"), 1), JobKey(RequestId("new"), 1), elsewhere, 2.0)
    book.abandon(JOB, ErrorKind.CANCELLED, "cancelled", 2.0)
    outcomes = book.tick(12.0)
    assert kinds(outcomes) == ["TearDownProducer", "PullFailed"]
    assert [p.source for p in book.live()] == [elsewhere]


def test_a_failed_read_frees_its_blocks_only_when_drained() -> None:
    book, read = reading()
    assert kinds(book.read_failed(read.read, "broken", drained=False, now=2.0)) == ["PullFailed"]
    assert book.num_quarantined == 2
    assert kinds(book.read_failed(read.read, "broken", drained=True, now=3.0)) == ["ReadEnded"]


def test_blocks_are_granted_once() -> None:
    book, _ = reading()
    with pytest.raises(HandoffError):
        book.granted(JOB, LOCAL, 1, 3, 2.0)


def test_one_handoff_is_not_pulled_twice() -> None:
    book = opened()
    with pytest.raises(AssertionError, match="is being pulled"):
        book.open(KEY, JobKey(RequestId("r2"), 1), SOURCE, 0.0)


def test_remainder_of_a_migration_is_requested_once_one_block_is_missing() -> None:
    book = opened()
    moving = [
        replace(announcement(first, stop), is_migrating=True, num_computed=4)
        for first, stop in ((0, 0), (0, 2), (2, 4))
    ]
    assert book.announced(moving[0], 1.0) == [] and book.granted(JOB, LOCAL, 0, 1, 1.0) == []
    assert kinds(book.announced(moving[1], 1.5)) == ["StartRead"]
    assert kinds(book.read_done(1, 2.0)) == ["ReadEnded"], "two are missing"
    assert kinds(book.announced(moving[2], 2.5)) == ["StartRead"]
    assert kinds(book.read_done(2, 3.0)) == ["ReadEnded", "RequestRemainder"]
    assert book.tick(3.5) == [], "it is asked for once"
    assert kinds(book.announced(moving[0], 4.0)) == ["RequestRemainder"], "a new stream repeats everything"
    last = replace(announcement(4, 4, TOKEN), is_migrating=True, num_computed=4)
    assert kinds(book.announced(last, 5.0)) == ["KVComplete"]


def test_an_offer_of_fewer_tokens_than_are_known_is_read_as_far_as_it_goes() -> None:
    """Read what is offered; the KV of the other tokens is computed on this worker."""
    book = opened()
    assert book.announced(announcement(0, 2, TOKEN), 1.0) == []
    (read,) = book.granted(JOB, LOCAL, 0, 3, 1.0)
    assert isinstance(read, StartRead) and len(read.local) == 2
    (_, arrived) = book.read_done(1, 2.0)
    assert isinstance(arrived, KVComplete) and arrived.num_computed == 2


# ---- remote prefix fetches


def prefix_server(timeout_s: float = 2.0, limit_s: float = 8.0) -> PullTable:
    """A prefix of four blocks, the first found in the own cache; the lease holds until 10 s."""
    book = PullTable(pull_timeout_s=20.0, drain_timeout_s=10.0)
    book.open_prefix_fetch(KEY, JOB, SOURCE, PrefixFetchTerms(1, timeout_s, limit_s), 0.0)
    assert book.granted(JOB, LOCAL, 1, 4, 0.0) == []
    book.renewed((KEY,), 0.0, 10.0)
    return book


def served(first: int, stop: int, *, is_last: bool = False) -> Announcement:
    return replace(announcement(first, stop), is_last=is_last)


def over(outcomes: list[PullOutcome]) -> PrefixFetchDone:
    (only,) = [x for x in outcomes if not isinstance(x, ReadEnded)]
    assert isinstance(only, PrefixFetchDone)
    return only


def read_of(outcomes: list[PullOutcome]) -> StartRead:
    (only,) = outcomes
    assert isinstance(only, StartRead)
    return only


def test_a_prefix_fetch_is_read_as_announced_and_ends_with_the_last_announcement() -> None:
    book = prefix_server()
    first = read_of(book.announced(served(1, 2), 1.0))
    assert (first.first_index, first.offered, first.local) == (1, (BlockDigest(BlockId(1), (1,)),), LOCAL[1:2])
    second = read_of(book.announced(served(2, 4, is_last=True), 1.5))
    # Reads end in any order.
    assert kinds(book.read_done(second.read, 2.0)) == ["ReadEnded"]
    end = over(book.read_done(first.read, 2.5))
    assert (end.num_ready, end.stats.num_hit_blocks, end.stats.num_blocks) == (4, 1, 3)
    assert end.stats.busy_s == pytest.approx(1.5) and len(book) == 0


def test_a_source_may_have_fewer_blocks_than_requested() -> None:
    book = prefix_server()
    read = read_of(book.announced(served(1, 3, is_last=True), 1.0))
    assert over(book.read_done(read.read, 2.0)).num_ready == 3


def test_blocks_beyond_the_request_are_not_read() -> None:
    book = prefix_server()
    read = read_of(book.announced(served(1, 9, is_last=True), 1.0))
    assert len(read.offered) == len(read.local) == 3
    assert over(book.read_done(read.read, 2.0)).num_ready == 4


def test_of_a_prefix_fetch_that_is_given_up_the_leading_blocks_stay() -> None:
    book = prefix_server()
    first, second = (read_of(book.announced(served(i, i + 1), 1.0)) for i in (1, 2))
    book.read_done(first.read, 1.5)
    assert over(book.source_lost(SOURCE, "gone", 1.6)).num_ready == 2
    assert kinds(book.read_done(second.read, 3.0)) == ["ReadEnded"], "its blocks wait for it"


@pytest.mark.parametrize("lease_until", [None, 1.5])
def test_of_a_prefix_fetch_without_a_lease_nothing_stays(lease_until: float | None) -> None:
    book = PullTable(pull_timeout_s=20.0, drain_timeout_s=10.0)
    book.open_prefix_fetch(KEY, JOB, SOURCE, PrefixFetchTerms(0, 2.0, 8.0), 0.0)
    book.granted(JOB, LOCAL, 0, 4, 0.0)
    if lease_until is not None:
        book.renewed((KEY,), lease_until - 1.0, 1.0)
    read = read_of(book.announced(served(0, 4, is_last=True), 1.0))
    assert kinds(book.read_done(read.read, 1.6)) == ["ReadEnded"]
    assert over(book.tick(4.0)).num_ready == 0


def test_a_prefix_fetch_without_progress_or_over_its_limit_is_given_up() -> None:
    book = prefix_server()
    assert book.next_deadline() == 2.0 and book.tick(1.9) == []
    assert over(book.tick(2.0)).num_ready == 1
    book = prefix_server()
    for i, at in ((1, 1.5), (2, 3.0), (3, 4.5)):
        book.read_done(read_of(book.announced(served(i, i + 1), at)).read, at)
    assert book.next_deadline() == 6.5
    book = prefix_server(timeout_s=20.0)
    assert book.next_deadline() == 8.0 and book.tick(7.9) == [] and over(book.tick(8.0)).num_ready == 1


def test_a_prefix_fetch_repeated_on_a_new_stream_is_read_once() -> None:
    book = prefix_server()
    read = read_of(book.announced(served(1, 3), 1.0))
    assert book.announced(served(1, 3), 1.1) == []
    last = read_of(book.announced(served(1, 4, is_last=True), 1.2))
    assert last.first_index == 3
    book.read_done(last.read, 1.3)
    assert over(book.read_done(read.read, 1.4)).num_ready == 4
