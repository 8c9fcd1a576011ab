"""Test LeaseTable event by event: fences, late consumers, replays."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffId, HandoffKey, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.kv.handoff import BlockDigest, HandoffError, LeaseState
from tandem.kv.kv_producer import LeaseTable

CONSUMER = WorkerRef(WorkerId("consumer"), Incarnation(1), "consumer:1")
BLOCKS = (BlockId(4), BlockId(2), BlockId(9))


def key(attempt: int = 1) -> HandoffKey:
    return HandoffKey(HandoffId("h"), attempt)


def job(attempt: int = 1) -> JobKey:
    return JobKey(RequestId("r"), attempt)


def opened(attempt: int = 1) -> LeaseTable:
    book = LeaseTable(10.0, memory_s=60.0)
    assert book.open(key(attempt), job(attempt), 0.0) is None
    return book


def refused(book: LeaseTable, attempt: int, now: float = 1.0) -> bool:
    try:
        book.open(key(attempt), job(attempt), now)
    except TandemError as error:
        return error.kind is ErrorKind.CANCELLED
    return False


def test_announcements_are_repeated_to_whoever_follows() -> None:
    book = opened()
    book.start(key(), BLOCKS)
    digests = [BlockDigest(b, (b,)) for b in BLOCKS]
    first = book.announce(key(), 2, digests[:2], 9, ())
    assert book.announce(key(), 2, [], 9, ()) is None
    last = book.announce(key(), 3, digests[2:], 11, (SampledToken(5),))
    assert first is not None and last is not None
    assert (first.first_index, first.blocks) == (0, tuple(digests[:2]))
    assert (last.first_index, last.blocks, last.first_tokens) == (2, (digests[2],), (SampledToken(5),))
    assert book.follow(key(), CONSUMER, 1.0) == [first, last]
    assert book.follow(key(), CONSUMER, 2.0) == [first, last]


def test_digests_of_other_blocks_are_a_defect() -> None:
    book = opened()
    book.start(key(), BLOCKS)
    with pytest.raises(AssertionError, match="digests of other blocks"):
        book.announce(key(), 1, [BlockDigest(BLOCKS[1], (1,))], 4, ())


def test_without_digests_blocks_are_announced_bare() -> None:
    book = opened()
    book.start(key(), BLOCKS)
    message = book.announce(key(), 3, [], 11, (SampledToken(5),))
    assert message is not None and message.blocks == tuple(BlockDigest(b, ()) for b in BLOCKS)


def test_a_lease_starts_once() -> None:
    book = opened()
    book.start(key(), BLOCKS)
    with pytest.raises(HandoffError):
        book.start(key(), BLOCKS)
    lease = book.find(key())
    assert lease is not None and lease.state is LeaseState.OFFERED and lease.blocks == BLOCKS


def test_a_lease_expires_on_time() -> None:
    book = opened()
    book.start(key(), BLOCKS)
    assert book.renew(key(), 4.0) and [lease.expires_at for lease in book] == [14.0]
    assert book.expire(13.9) == []
    (ended,) = book.expire(14.0)
    assert (ended.key, ended.job, ended.blocks, ended.consumer) == (key(), job(), BLOCKS, None)
    assert not book.renew(key(), 14.1) and book.follow(key(), CONSUMER, 14.1) is None
    assert book.end_reason(key()) is ErrorKind.KV_LOST


def test_a_follow_renews() -> None:
    book = opened()
    assert book.follow(key(), CONSUMER, 9.0) == [] and book.expire(18.9) == []


def test_a_newer_attempt_ends_the_older_one() -> None:
    book = opened(2)
    ended = book.open(key(3), job(3), 1.0)
    assert ended is not None and ended.key == key(2)
    assert book.release(key(2), 2.0) is None and book.find(key(3)) is not None
    assert book.end_reason(key(2)) is ErrorKind.CANCELLED and book.end_reason(key(3)) is None
    assert not book.renew(key(2), 2.0) and book.follow(key(2), CONSUMER, 2.0) is None


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_attempts_up_to_a_live_one_are_refused(attempt: int) -> None:
    assert refused(opened(3), attempt)


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_attempts_up_to_an_ended_one_are_refused(attempt: int) -> None:
    book = opened(3)
    assert book.release(key(3), 1.0) is not None
    assert refused(book, attempt)
    assert not refused(book, 4)


def test_a_release_before_the_prefill_rejects_the_prefill() -> None:
    book = LeaseTable(10.0)
    assert book.release(key(2), 0.0) is None
    assert refused(book, 2) and refused(book, 1) and not refused(book, 3)


def test_a_follow_before_the_prefill_waits() -> None:
    book = LeaseTable(10.0, memory_s=60.0)
    assert book.follow(key(), CONSUMER, 0.0) == [] and book.renew(key(), 1.0)
    book.open(key(), job(), 2.0)
    lease = book.find(key())
    assert lease is not None and lease.consumer == CONSUMER


def test_a_follow_of_a_fenced_attempt_does_not_wait() -> None:
    book = LeaseTable(10.0, memory_s=60.0)
    assert book.follow(key(1), CONSUMER, 0.0) == []
    book.open(key(2), job(2), 1.0)
    assert not book.renew(key(1), 1.0)


def offered(attempt: int = 1) -> LeaseTable:
    """Offer a lease whose consumer follows it at 4.0 and may read two of its three blocks."""
    book = opened(attempt)
    book.start(key(attempt), BLOCKS)
    book.announce(key(attempt), 2, [], 9, ())
    assert book.follow(key(attempt), CONSUMER, 4.0)
    return book


def test_blocks_that_may_be_read_are_held_until_released() -> None:
    book = offered()
    ended = book.withdraw(key(), 5.0, ErrorKind.CANCELLED)
    assert ended is not None and (ended.job, ended.blocks, ended.consumer) == (job(), (), CONSUMER)
    assert book.find(key()) is None and book.end_reason(key()) is ErrorKind.CANCELLED
    assert len(book) == 1 and tuple(book.blocks()) == BLOCKS
    assert book.withdraw(key(), 5.0) is None, "it holds on"
    freed = book.release(key(), 6.0)
    assert freed is not None and (freed.job, freed.blocks, freed.consumer) == (None, BLOCKS, None)
    assert len(book) == 0 and book.release(key(), 6.0) is None


def test_a_withdrawn_lease_is_held_no_longer_than_granted() -> None:
    book = offered()
    book.withdraw(key(), 5.0)
    assert not book.renew(key(), 6.0) and book.follow(key(), CONSUMER, 6.0) is None
    assert book.next_expiry() == 14.0 and book.expire(13.9) == []
    (freed,) = book.expire(14.0)
    assert (freed.job, freed.blocks, freed.consumer) == (None, BLOCKS, None)
    assert len(book) == 0 and book.end_reason(key()) is ErrorKind.KV_LOST


@pytest.mark.parametrize("what", ["nobody follows", "nothing may be read", "no blocks"])
def test_blocks_that_cannot_be_read_are_free_at_once(what: str) -> None:
    book = opened()
    if what != "no blocks":
        book.start(key(), BLOCKS)
    if what == "nobody follows":
        book.announce(key(), 2, [], 9, ())
    else:
        book.follow(key(), CONSUMER, 4.0)
    ended = book.withdraw(key(), 5.0)
    assert ended is not None and ended.blocks == (() if what == "no blocks" else BLOCKS)
    assert len(book) == 0


def test_a_newer_attempt_keeps_blocks_that_are_being_read() -> None:
    book = offered(2)
    older = book.open(key(3), job(3), 5.0)
    assert older is not None and (older.key, older.blocks, older.consumer) == (key(2), (), CONSUMER)
    book.start(key(3), (BlockId(7),))
    assert sorted(book.blocks()) == [2, 4, 7, 9]
    freed = book.release(key(2), 6.0)
    assert freed is not None and freed.blocks == BLOCKS
    assert book.find(key(3)) is not None and list(book.blocks()) == [7]


def digests(first: int, stop: int) -> tuple[BlockDigest, ...]:
    return tuple(BlockDigest(BlockId(i), (i,)) for i in range(first, stop))


def served(attempt: int = 1) -> LeaseTable:
    """Open a lease of a remote prefix fetch of five blocks, of which the consumer has two."""
    book = LeaseTable(10.0)
    assert book.can_serve_prefix(key(attempt)) and book.open(key(attempt), None, 0.0) is None
    book.start(key(attempt), tuple(BlockId(i) for i in range(5)), 2)
    return book


def test_a_prefix_fetch_is_announced_from_its_first_missing_block_to_its_last() -> None:
    book = served()
    parts = [book.announce_served(key(), digests(2, 4), 16), book.announce_served(key(), digests(4, 5), 20)]
    assert [(part.first_index, part.num_computed, part.is_last) for part in parts] == [(2, 16, False), (4, 20, True)]
    assert book.follow(key(), CONSUMER, 1.0) == parts


def test_only_a_newer_attempt_at_a_prefix_fetch_is_served() -> None:
    book = served(2)
    assert [book.can_serve_prefix(key(attempt)) for attempt in (1, 2, 3)] == [False, False, True]
    ended = book.open(key(3), None, 1.0)
    assert ended is not None and ended.job is None and ended.blocks == tuple(range(5))
    book.release(key(3), 2.0)
    assert not book.can_serve_prefix(key(3)) and book.can_serve_prefix(key(4))


def test_a_hand_off_of_a_job_is_not_taken_for_a_prefix_fetch() -> None:
    book = opened(1)
    assert not book.can_serve_prefix(key(1)) and not book.can_serve_prefix(key(2))


def test_memory_ends() -> None:
    book = LeaseTable(10.0, memory_s=60.0)
    book.release(key(2), 0.0)
    book.follow(HandoffKey(HandoffId("other"), 1), CONSUMER, 0.0)
    book.expire(60.0)
    assert book.end_reason(key(2)) is None and not book.renew(HandoffKey(HandoffId("other"), 1), 61.0)


def test_the_reason_of_an_end_is_kept() -> None:
    book = opened()
    book.release(key(), 0.0, ErrorKind.CANCELLED)
    assert book.end_reason(key()) is ErrorKind.CANCELLED
