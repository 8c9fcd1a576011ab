"""Test KVProducer event by event: fences, late consumers, replays, served prefixes."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import (
    BlockHash,
    BlockId,
    HandoffId,
    HandoffKey,
    Incarnation,
    JobKey,
    RequestId,
    WorkerId,
    WorkerRef,
)
from tandem.core.request import PrefillJob, Request, SamplingParams
from tandem.engine.effects import Effect, SendAnnouncement, SendHandoffEnded
from tandem.engine.kv_producer import KVProducer
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.handoff import Announcement, BlockDigest, HandoffError, LeaseState, RemotePrefixRequest
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.step_plan import StepPlan

CONSUMER = WorkerRef(WorkerId("consumer"), Incarnation(1), "consumer:1")
BLOCKS = (BlockId(0), BlockId(1), BlockId(2))
NAMES = tuple(BlockHash(bytes([number]) * 16) for number in range(1, 6))
TOKEN = SampledToken(5)
REQUEST = Request(id=RequestId("r"), model="m", prompt_tokens=tuple(range(11)), sampling=SamplingParams(max_tokens=3))


def key(attempt: int = 1) -> HandoffKey:
    return HandoffKey(HandoffId("h"), attempt)


def prefill(attempt: int = 1) -> PrefillJob:
    return PrefillJob(request=REQUEST, attempt=attempt, handoff=HandoffId("h"))


def job(attempt: int = 1) -> JobKey:
    return prefill(attempt).key


class Producer(KVProducer):
    """A producer of a pool of blocks of four tokens, none of which a sequence holds."""

    def __init__(self) -> None:
        self.pool = BlockPool(12, 4)
        super().__init__(self.pool, 10.0, memory_s=60.0)

    def started(self, attempt: int = 1, num_blocks: int = len(BLOCKS)) -> None:
        """Give a lease blocks whose sequence ends at once."""
        table = BlockTable()
        assert self.pool.grow(table, num_blocks)
        self.pool.retain(table.ids(), Holder.LEASE)
        self.start(key(attempt), table.ids())
        self.pool.release(table)

    def computed(
        self,
        num_computed: int,
        digests: tuple[BlockDigest, ...] = (),
        attempt: int = 1,
        first_tokens: tuple[SampledToken, ...] = (),
    ) -> list[Effect]:
        update = SequenceUpdate(
            prefill(attempt),
            num_computed,
            0,
            0,
            digests=digests,
            handed_over=bool(first_tokens),
            first_tokens=first_tokens,
        )
        return self.on_chunk(prefill(attempt), update, 1.0)

    def messages(self, attempt: int = 1) -> list[Announcement]:
        lease = self.find(key(attempt))
        assert lease is not None
        return lease.announcements

    def checked(self) -> None:
        self.check({job(attempt) for attempt in range(9)})
        self.pool.check((), self.blocks(), ())


def opened(attempt: int = 1) -> Producer:
    book = Producer()
    assert book.open(key(attempt), job(attempt), 0.0) == (None, [])
    return book


def refused(book: Producer, attempt: int) -> bool:
    try:
        book.open(key(attempt), job(attempt), 1.0)
    except TandemError as error:
        return error.kind is ErrorKind.CANCELLED
    return False


def notified(effects: list[Effect]) -> list[tuple[HandoffKey, ErrorKind]]:
    assert all(isinstance(x, SendHandoffEnded) and x.consumer == CONSUMER for x in effects)
    return [(x.key, x.kind) for x in effects if isinstance(x, SendHandoffEnded)]


def follow(book: Producer, attempt: int = 1, now: float = 1.0) -> list[Announcement] | None:
    """Return the announcements so far, None where the hand-off has ended."""
    effects = book.on_follow(key(attempt), CONSUMER, now)
    messages = [x.message for x in effects if isinstance(x, SendAnnouncement)]
    return None if any(isinstance(x, SendHandoffEnded) for x in effects) else messages


def renewed(book: Producer, attempt: int, now: float) -> bool:
    return not book.on_renew([key(attempt)], CONSUMER, now)


def test_announcements_are_repeated_to_whoever_follows() -> None:
    book = opened()
    book.started()
    digests = tuple(BlockDigest(b, (b,)) for b in BLOCKS)
    assert book.computed(9, digests[:2]) == [], "nobody follows"
    book.computed(9)
    book.computed(11, digests[2:], first_tokens=(TOKEN,))
    first, last = book.messages()
    assert (first.first_index, first.blocks) == (0, digests[:2])
    assert (last.first_index, last.blocks, last.first_tokens) == (2, (digests[2],), (TOKEN,))
    assert follow(book) == [first, last]
    assert follow(book, now=2.0) == [first, last]


def test_digests_of_other_blocks_are_a_defect() -> None:
    book = opened()
    book.started()
    with pytest.raises(AssertionError, match="digests of other blocks"):
        book.computed(4, (BlockDigest(BLOCKS[1], (1,)),))


def test_without_digests_blocks_are_announced_bare() -> None:
    book = opened()
    book.started()
    book.computed(11, first_tokens=(TOKEN,))
    (message,) = book.messages()
    assert message.blocks == tuple(BlockDigest(b, ()) for b in BLOCKS)


def test_a_lease_starts_once() -> None:
    book = opened()
    book.started()
    with pytest.raises(HandoffError):
        book.started()
    lease = book.find(key())
    assert lease is not None and lease.state is LeaseState.OFFERED and lease.blocks == BLOCKS


def test_a_lease_expires_on_time() -> None:
    book = opened()
    book.started()
    assert renewed(book, 1, 4.0) and [lease.expires_at for lease in book] == [14.0]
    assert book.on_tick(13.9) == ([], [])
    ((ended,), effects) = book.on_tick(14.0)
    assert (ended.key, ended.job) == (key(), job()) and book.pool.num_leased == 0
    assert notified(effects) == [(key(), ErrorKind.KV_LOST)]
    assert not renewed(book, 1, 14.1) and follow(book, 1, 14.1) is None
    assert book.end_reason(key()) is ErrorKind.KV_LOST


def test_a_follow_renews() -> None:
    book = opened()
    assert follow(book, 1, 9.0) == [] and book.on_tick(18.9) == ([], [])


def test_a_newer_attempt_ends_the_older_one() -> None:
    book = opened(2)
    assert book.open(key(3), job(3), 1.0) == (job(2), [])
    assert book.on_release(key(2), 2.0) is None and book.find(key(3)) is not None
    assert book.end_reason(key(2)) is ErrorKind.CANCELLED and book.end_reason(key(3)) is None
    assert not renewed(book, 2, 2.0) and follow(book, 2, 2.0) is None


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_attempts_up_to_a_live_or_an_ended_one_are_refused(attempt: int, has_ended: bool) -> None:
    book = opened(3)
    if has_ended:
        assert book.on_release(key(3), 1.0) == job(3)
    assert refused(book, attempt)
    assert not refused(book, 4)


def test_a_release_before_the_prefill_rejects_the_prefill() -> None:
    book = Producer()
    assert book.on_release(key(2), 0.0) is None
    assert refused(book, 2) and refused(book, 1) and not refused(book, 3)


def test_a_follow_before_the_prefill_waits() -> None:
    book = Producer()
    assert follow(book, 1, 0.0) == [] and renewed(book, 1, 1.0)
    book.open(key(), job(), 2.0)
    lease = book.find(key())
    assert lease is not None and lease.consumer == CONSUMER


def test_a_follow_of_a_fenced_attempt_does_not_wait() -> None:
    book = Producer()
    assert follow(book, 1, 0.0) == []
    book.open(key(2), job(2), 1.0)
    assert not renewed(book, 1, 1.0)


def offered(attempt: int = 1) -> Producer:
    """Offer a lease whose consumer follows it at 4.0 and may read two of its three blocks."""
    book = opened(attempt)
    book.started(attempt)
    book.computed(9, attempt=attempt)
    assert follow(book, attempt, 4.0)
    return book


def test_blocks_that_may_be_read_are_held_until_released() -> None:
    book = offered()
    assert notified(book.withdraw(key(), ErrorKind.CANCELLED, "", 5.0)) == [(key(), ErrorKind.CANCELLED)]
    assert book.find(key()) is None and book.end_reason(key()) is ErrorKind.CANCELLED
    assert len(book) == 1 and tuple(book.blocks()) == BLOCKS
    assert book.withdraw(key(), ErrorKind.KV_LOST, "", 5.0) == [], "it holds on"
    book.checked()
    assert book.on_release(key(), 6.0) is None and book.pool.num_leased == 0
    assert len(book) == 0 and book.on_release(key(), 6.0) is None
    book.checked()


def test_a_withdrawn_lease_is_held_no_longer_than_granted() -> None:
    book = offered()
    book.withdraw(key(), ErrorKind.KV_LOST, "", 5.0)
    assert not renewed(book, 1, 6.0) and follow(book, 1, 6.0) is None
    assert book.next_expiry() == 14.0 and book.on_tick(13.9) == ([], []) and book.pool.num_leased == 3
    assert book.on_tick(14.0) == ([], []) and book.pool.num_leased == 0
    assert len(book) == 0 and book.end_reason(key()) is ErrorKind.KV_LOST


@pytest.mark.parametrize("what", ["nobody follows", "nothing may be read", "no blocks"])
def test_blocks_that_cannot_be_read_are_free_at_once(what: str) -> None:
    book = opened()
    if what != "no blocks":
        book.started()
    if what == "nobody follows":
        book.computed(9)
    else:
        follow(book, 1, 4.0)
    assert len(notified(book.withdraw(key(), ErrorKind.KV_LOST, "", 5.0))) == (what != "nobody follows")
    assert len(book) == book.pool.num_leased == 0
    book.checked()


def test_a_newer_attempt_keeps_blocks_that_are_being_read() -> None:
    book = offered(2)
    older, effects = book.open(key(3), job(3), 5.0)
    assert older == job(2) and notified(effects) == [(key(2), ErrorKind.CANCELLED)]
    book.started(3, 1)
    assert sorted(book.blocks()) == [0, 1, 2, 3]
    assert book.on_release(key(2), 6.0) is None
    assert book.find(key(3)) is not None and list(book.blocks()) == [3]
    book.checked()


def caching() -> Producer:
    """Return a producer with a cached prefix of five blocks."""
    book = Producer()
    table = BlockTable()
    assert book.pool.grow(table, len(NAMES))
    book.pool.publish(table, NAMES)
    book.pool.release(table)
    return book


def serve(book: Producer, attempt: int = 1, first: int = 2, now: float = 0.0) -> list[Effect]:
    return book.on_follow(key(attempt), CONSUMER, now, RemotePrefixRequest(first, NAMES))


def digest(book: Producer, number: int, most: int = 9) -> list[Announcement]:
    """Digest at most `most` blocks of served prefixes in a plan."""
    places = book.blocks_to_digest()[:most]
    book.on_planned(StepPlan(number, (), digests=places))
    effects = book.on_digests(number, [BlockDigest(block, (index,)) for block, index in places], 1.0)
    return [x.message for x in effects if isinstance(x, SendAnnouncement)]


def test_a_prefix_is_announced_from_its_first_missing_block_to_its_last() -> None:
    book = caching()
    assert serve(book) == [] and book.pool.num_leased == 5, "the parents too"
    parts = [*digest(book, 0, 2), *digest(book, 1)]
    assert [(part.first_index, part.num_computed, part.is_last) for part in parts] == [(2, 16, False), (4, 20, True)]
    assert book.blocks_to_digest() == ()
    assert serve(book, now=1.0) == [SendAnnouncement(CONSUMER, part) for part in parts]
    book.checked()


def test_only_a_newer_attempt_at_a_prefix_is_served() -> None:
    book = caching()
    serve(book, 2)
    assert notified(serve(book, 1)) == [(key(1), ErrorKind.CANCELLED)]
    assert notified(serve(book, 3)) == [(key(2), ErrorKind.CANCELLED)] and book.find(key(3)) is not None
    book.on_release(key(3), 2.0)
    assert notified(serve(book, 3)) == [(key(3), ErrorKind.KV_LOST)] and serve(book, 4) == []
    book.checked()


def test_a_hand_off_of_a_job_is_not_taken_for_a_served_prefix() -> None:
    book = opened(1)
    assert notified(serve(book, 1)) == [(key(1), ErrorKind.KV_LOST)]
    assert serve(book, 2) == [] and book.find(key(1)) is not None


def test_a_prefix_that_the_consumer_has_is_not_served() -> None:
    book = caching()
    assert notified(serve(book, first=5)) == [(key(1), ErrorKind.KV_LOST)]
    assert len(book) == book.pool.num_leased == 0


def test_a_served_prefix_that_has_ended_is_digested_no_more() -> None:
    book = caching()
    serve(book, 1)
    book.on_follow(HandoffKey(HandoffId("b"), 1), CONSUMER, 0.0, RemotePrefixRequest(3, NAMES))
    assert len(book.blocks_to_digest()) == 5
    book.on_release(key(1), 1.0)
    assert book.blocks_to_digest() == ((BlockId(3), 3), (BlockId(4), 4))
    book.on_release(HandoffKey(HandoffId("b"), 1), 1.0)
    assert not book.blocks_to_digest() and digest(book, 0) == []
    book.checked()


def test_a_served_prefix_whose_plan_failed_ends() -> None:
    book = caching()
    serve(book)
    book.on_planned(StepPlan(0, (), digests=book.blocks_to_digest()))
    assert notified(book.on_digests(0, (), 1.0)) == [(key(), ErrorKind.KV_LOST)]
    assert len(book) == 0


def test_memory_ends() -> None:
    book = Producer()
    other = HandoffKey(HandoffId("other"), 1)
    book.on_release(key(2), 0.0)
    book.on_follow(other, CONSUMER, 0.0)
    book.on_tick(60.0)
    assert book.end_reason(key(2)) is None and book.on_renew([other], CONSUMER, 61.0)


def test_a_lease_whose_follower_was_forgotten_goes_to_whoever_renews_it() -> None:
    """A consumer that stalls for longer than the memory, while its prefill waits at the gateway."""
    book = Producer()
    book.on_follow(key(), CONSUMER, 0.0)
    book.on_tick(60.0)
    book.open(key(), job(), 61.0)
    book.started()
    assert book.computed(9) == [], "nobody follows"
    effects = book.on_renew([key()], CONSUMER, 62.0)
    assert [x.message.first_index for x in effects if isinstance(x, SendAnnouncement)] == [0]
    assert book.on_renew([key()], CONSUMER, 63.0) == []


def test_a_prefill_that_ends_with_its_first_token_hands_nothing_over() -> None:
    book = offered()
    update = SequenceUpdate(prefill(), 11, 0, 0, (TOKEN,), finish=FinishReason.STOP, first_tokens=(TOKEN,))
    assert notified(book.on_chunk(prefill(), update, 5.0)) == [(key(), ErrorKind.CANCELLED)]


def test_the_reason_of_an_end_is_kept() -> None:
    book = opened()
    book.on_release(key(), 0.0, ErrorKind.CANCELLED)
    assert book.end_reason(key()) is ErrorKind.CANCELLED
