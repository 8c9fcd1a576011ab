"""Test both ends of handoffs over a stream that breaks, a transport of arbitrary order, and clocks that stall."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.request import PrefillJob, Request, ResumeJob, SamplingParams
from tandem.engine.effects import (
    ConsumerEffect,
    PullEnded,
    ReleaseHandoff,
    SendAnnouncement,
    SendHandoffEnded,
    StartRead,
    TearDownPeer,
)
from tandem.engine.kv_consumer import KVConsumer
from tandem.engine.kv_producer import KVProducer
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.handoff import Announcement, BlockDigest, LeaseState, PullState
from tandem.sched.state.schedule_result import PullAllocated, SequenceUpdate
from tests.effort import effort

PRODUCER = WorkerRef(WorkerId("producer"), Incarnation(1), "producer:1")
CONSUMER = WorkerRef(WorkerId("consumer"), Incarnation(1), "consumer:1")
LEASE_S, PULL_TIMEOUT_S, DRAIN_TIMEOUT_S, MEMORY_S = 10.0, 20.0, 10.0, 60.0
NUM_BLOCKS = 24
PROMPT_BLOCKS = 4
TOKEN = SampledToken(5)
# Mostly true: what breaks a hand-off must not come so often that none gets far.
LUCK = st.sampled_from([False, True, True, True])
Content = tuple[HandoffKey, int] | str


@dataclass(eq=False)
class Read:
    """One read of the transport: it copies whatever is there, whenever it likes, until it has ended."""

    order: StartRead
    key: HandoffKey
    has_copied: bool = False


def request_of(key: HandoffKey) -> Request:
    sampling = SamplingParams(max_tokens=9)
    prompt = tuple(range(PROMPT_BLOCKS))
    return Request(id=RequestId(key.handoff), model="m", prompt_tokens=prompt, sampling=sampling)


def job_of(key: HandoffKey) -> ResumeJob:
    return ResumeJob(request=request_of(key), attempt=key.attempt, handoff=key.handoff, source=PRODUCER)


def prefill_of(key: HandoffKey) -> PrefillJob:
    return PrefillJob(request=request_of(key), attempt=key.attempt, handoff=key.handoff)


def new_pool() -> BlockPool:
    return BlockPool(NUM_BLOCKS, 1, enable_prefix_caching=False)


class HandoffMachine(RuleBasedStateMachine):
    """`digests`: a read whose bytes are not those offered is reported as failed, which may happen to nobody who waits
    for it under a good lease. Without them the lease alone must keep wrong KV out."""

    digests = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.producer_pool, self.consumer_pool = new_pool(), new_pool()
        self.leases = KVProducer(self.producer_pool, LEASE_S, memory_s=MEMORY_S)
        self.pulls = KVConsumer(
            self.consumer_pool,
            HandoffConfig(lease_s=LEASE_S, pull_timeout_s=PULL_TIMEOUT_S, drain_timeout_s=DRAIN_TIMEOUT_S),
        )
        # The producer's memory.
        self.given: list[Content] = ["none"] * NUM_BLOCKS
        self.progress: dict[HandoffKey, int] = {}
        self.newest: dict[HandoffId, tuple[int, float]] = {}
        # The consumer's memory, who has a table, and what the transport may still write.
        self.taken: list[Content] = ["none"] * NUM_BLOCKS
        self.tables: dict[HandoffKey, BlockTable] = {}
        self.reads: dict[int, Read] = {}
        self.lingers = False
        self.outcomes: dict[HandoffKey, str] = {}
        self.hits: dict[HandoffKey, int] = {}
        self.torn = False
        # The stream, in both directions; messages are calls with their arguments.
        self.to_producer: deque[tuple[str, tuple[HandoffKey, ...], float]] = deque()
        self.to_consumer: deque[Announcement | tuple[str, tuple[HandoffKey, ...], float]] = deque()

    # ---- time

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 6.0, 9.0, 11.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        """Nobody looks at the clock: this is a stall of both sides until they tick."""
        self.now += seconds

    @rule()
    def producer_ticks(self) -> None:
        ended, _ = self.leases.on_tick(self.now)
        for lease in ended:
            self.remember_end(lease.key)
        self.recycle()

    @precondition(lambda self: len(self.leases) > 0)
    @rule()
    def producer_lapses_in_time(self) -> None:
        """The first moment at which the producer may take a lease's blocks back."""
        self.now = max(self.now, min((lease.expires_at for lease in self.leases), default=0.0))
        self.producer_ticks()

    @rule()
    def consumer_ticks(self) -> None:
        self.carry_out(self.pulls.on_tick(self.now))
        for pull in self.pulls:
            late = pull.lease_until is not None and self.now - pull.lease_until >= PULL_TIMEOUT_S
            assert not late, "a source that renews no lease is waited for"

    @rule()
    def consumer_renews(self) -> None:
        keys = tuple(pull.key for pull in self.pulls)
        if keys:
            self.to_producer.append(("renew", keys, self.now))

    # ---- the gateway

    @rule(handoff=st.sampled_from(["a", "b", "c"]), luck=LUCK)
    def new_attempt(self, handoff: str, luck: bool) -> None:
        """The consumer first; it fences its own older attempt."""
        if luck and any(k.handoff == handoff and how == "open" for k, how in self.outcomes.items()):
            return
        attempts = [key.attempt for key in self.outcomes if key.handoff == handoff]
        key = HandoffKey(HandoffId(handoff), max(attempts, default=0) + 1)
        for old in [k for k in self.outcomes if k.handoff == handoff]:
            self.abandon(old)
        self.pulls.on_resume(job_of(key), self.now)
        self.outcomes[key] = "open"
        self.to_producer.append(("follow", (key,), self.now))

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data())
    def prefill_is_submitted(self, data: st.DataObject) -> None:
        """Of any attempt, at any time, once or twice."""
        self.submit(data.draw(st.sampled_from(sorted(self.outcomes))))

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data())
    def prefill_of_the_newest_is_submitted(self, data: st.DataObject) -> None:
        handoff = data.draw(st.sampled_from(sorted({k.handoff for k in self.outcomes})))
        self.submit(max(k for k in self.outcomes if k.handoff == handoff))

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data(), luck=LUCK)
    def cancel(self, data: st.DataObject, luck: bool) -> None:
        if luck:
            return
        self.abandon(data.draw(st.sampled_from(sorted(self.outcomes))))

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data(), luck=LUCK)
    def gateway_recalls(self, data: st.DataObject, luck: bool) -> None:
        """Not on the stream, so at any time, and for any attempt. Whether its consumer hears of it is another
        matter."""
        if not luck:
            self.recall(data.draw(st.sampled_from(sorted(self.outcomes))))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), luck=LUCK)
    def gateway_recalls_what_is_read(self, data: st.DataObject, luck: bool) -> None:
        """Or the producer ends it, which is the same to its consumer: the read is over before it hears of that."""
        if luck:
            return
        read = self.reads[data.draw(st.sampled_from(sorted(self.reads)))]
        self.recall(read.key)
        self.end_read(read.order.read)

    # ---- the producer computes

    @precondition(lambda self: self.open_leases())
    @rule(data=st.data(), num=st.integers(0, 3))
    def compute(self, data: st.DataObject, num: int) -> None:
        self.compute_on(data.draw(st.sampled_from(self.open_leases())), num)

    # ---- the stream

    @precondition(lambda self: self.to_producer)
    @rule()
    def producer_receives(self) -> None:
        what, keys, sent_at = self.to_producer.popleft()
        if what == "release":
            for key in keys:
                self.release(key)
            return
        granted = []
        for key in keys:
            if what == "follow":
                effects = self.leases.on_follow(key, CONSUMER, self.now)
            else:
                effects = self.leases.on_renew([key], CONSUMER, self.now)
            self.to_consumer.extend(x.message for x in effects if isinstance(x, SendAnnouncement))
            if any(isinstance(x, SendHandoffEnded) for x in effects):
                self.to_consumer.append(("ended", (key,), self.now))
            else:
                granted.append(key)
        self.to_consumer.append(("renewed", tuple(granted), sent_at))

    @precondition(lambda self: self.to_consumer)
    @rule(again=st.booleans())
    def consumer_receives(self, again: bool) -> None:
        """A repeated announcement is what a second StreamHandoff on the same stream gives."""
        message = self.to_consumer.popleft()
        if isinstance(message, Announcement):
            for _ in range(1 + again):
                keys = (job_of(message.key).key,)
                self.carry_out(self.pulls.on_announcement(message, keys, self.now))
            return
        what, keys, sent_at = message
        if what == "renewed":
            self.pulls.on_renewed(keys, sent_at, LEASE_S)
            return
        for key in keys:
            self.carry_out(self.pulls.on_handoff_ended(key, ErrorKind.KV_LOST, "ended", self.now))

    @rule()
    def stream_flows(self) -> None:
        while self.to_producer:
            self.producer_receives()
        while self.to_consumer:
            self.consumer_receives(False)

    @rule(num=st.integers(1, PROMPT_BLOCKS))
    def all_goes_well(self, num: int) -> None:
        """A part of the way for every hand-off, so that the rest happens in every state."""
        for handoff in sorted({k.handoff for k in self.outcomes}):
            self.submit(max(k for k in self.outcomes if k.handoff == handoff))
        self.stream_flows()
        for key in self.open_leases():
            self.compute_on(key, num)
        self.stream_flows()
        for key in sorted(p.key for p in self.pulls if p.state is PullState.WAITING and p.offered):
            self.grant_room(key, num % 2)

    @rule(luck=LUCK)
    def stream_breaks(self, luck: bool) -> None:
        """What is under way is lost; the consumer follows again whatever it still needs."""
        if luck:
            return
        self.to_producer.clear()
        self.to_consumer.clear()
        for pull in self.pulls:
            self.to_producer.append(("follow", (pull.key,), self.now))

    # ---- the consumer gets room

    @precondition(lambda self: any(p.state is PullState.WAITING and p.offered for p in self.pulls))
    @rule(data=st.data(), num_hits=st.integers(0, PROMPT_BLOCKS - 1))
    def grant(self, data: st.DataObject, num_hits: int) -> None:
        keys = sorted(p.key for p in self.pulls if p.state is PullState.WAITING and p.offered)
        self.grant_room(data.draw(st.sampled_from(keys)), num_hits)

    def grant_room(self, key: HandoffKey, num_hits: int) -> None:
        table = BlockTable()
        if not self.consumer_pool.grow(table, PROMPT_BLOCKS + 1):
            return
        for i, block in enumerate(table.ids()):
            self.taken[block] = (key, i) if i < num_hits else "fresh"
        self.tables[key] = table
        self.hits[key] = num_hits
        grant = PullAllocated(job_of(key).key, table, num_hits, PROMPT_BLOCKS)
        self.carry_out(self.pulls.on_blocks(grant, self.now))

    # ---- the transport

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), then_ends=st.booleans())
    def copy(self, data: st.DataObject, then_ends: bool) -> None:
        read = self.reads[data.draw(st.sampled_from(sorted(self.reads)))]
        for offered, mine in zip(read.order.offered, read.order.local, strict=True):
            self.taken[mine] = self.given[offered.block]
        read.has_copied = True
        if then_ends:
            self.end_read(read.order.read)

    @precondition(lambda self: any(r.has_copied for r in self.reads.values()))
    @rule(data=st.data())
    def read_ends(self, data: st.DataObject) -> None:
        ids = sorted(i for i, r in self.reads.items() if r.has_copied)
        self.end_read(data.draw(st.sampled_from(ids)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), drained=st.booleans(), luck=LUCK)
    def read_fails(self, data: st.DataObject, drained: bool, luck: bool) -> None:
        if luck:
            return
        read = data.draw(st.sampled_from(sorted(self.reads)))
        self.fail_read(read, drained)

    @rule(read=st.integers(1, 40))
    def late_word_of_a_read(self, read: int) -> None:
        """A report of a read that was reported, or never was."""
        if read not in self.reads:
            assert self.pulls.on_read_done(read, self.now) == []
            assert self.pulls.on_read_failed(read, "late", drained=True, now=self.now) == []

    @rule(proven=st.booleans(), luck=LUCK)
    def peer_is_lost(self, proven: bool, luck: bool) -> None:
        if not luck or self.torn:
            self.lose_peer(proven)

    @precondition(lambda self: self.lingers)
    @rule()
    def peer_is_drained(self) -> None:
        self.lose_peer(True)

    # ---- what must hold

    @invariant()
    def blocks_under_reads_are_held(self) -> None:
        held = sorted(self.pulls.blocks())
        assert held == sorted(b for r in self.reads.values() for b in r.order.local)
        assert self.pulls.num_reads == len(self.reads)
        assert len(set(held)) == len(held), "two reads into one block"
        self.consumer_pool.check(self.tables.values(), (), held)
        self.pulls.check({job_of(key).key for key, how in self.outcomes.items() if how == "open"})

    @invariant()
    def tables_are_of_open_pulls(self) -> None:
        live = {p.key for p in self.pulls}
        assert live == {k for k, how in self.outcomes.items() if how == "open"}
        self.producer_pool.check((), self.leases.blocks(), ())
        self.leases.check({prefill_of(lease.key).key for lease in self.leases})

    def teardown(self) -> None:
        """Both sides work, nothing new comes: within two deadlines and the producer's memory everything has ended."""
        for _ in range(int(2 * PULL_TIMEOUT_S + DRAIN_TIMEOUT_S + MEMORY_S)):
            self.now += 1.0
            self.consumer_renews()
            while self.to_producer:
                self.producer_receives()
            for key in self.open_leases():
                self.compute_on(key, PROMPT_BLOCKS)
            while self.to_consumer:
                self.consumer_receives(False)
            for read in sorted(self.reads):
                self.end_read(read)
            self.producer_ticks()
            self.consumer_ticks()
        if self.lingers:
            self.lose_peer(True)
        assert "open" not in self.outcomes.values() and not self.reads and not len(self.pulls)
        assert not len(self.leases) and self.producer_pool.num_free == self.consumer_pool.num_free == NUM_BLOCKS

    # ---- how

    def open_leases(self) -> list[HandoffKey]:
        return sorted(lease.key for lease in self.leases if lease.state is not LeaseState.WITHDRAWN)

    def submit(self, key: HandoffKey) -> None:
        newest, when = self.newest.get(key.handoff, (0, 0.0))
        current = next((x for x in self.open_leases() if x.handoff == key.handoff), None)
        if current == key:
            self.refuse(key)
            return
        if key in self.progress and self.now - when >= MEMORY_S:
            return  # the engine remembers jobs that have ended for longer, and does not accept them again
        try:
            ended, _ = self.leases.open(key, prefill_of(key).key, self.now)
        except TandemError:
            assert key.attempt <= newest, f"{key} was refused without a reason"
            return
        fenced = key.attempt <= newest and (current is not None or self.now - when < MEMORY_S)
        assert not fenced, f"{key} was accepted after attempt {newest}"
        self.newest[key.handoff] = (key.attempt, self.now)
        self.progress[key] = 0
        assert ended is None or ended.attempt < key.attempt
        self.recycle()

    def refuse(self, key: HandoffKey) -> None:
        """A second grant of a lease that is open."""
        try:
            self.leases.open(key, prefill_of(key).key, self.now)
        except TandemError:
            return
        raise AssertionError(f"{key} was opened twice")

    def compute_on(self, key: HandoffKey, num: int) -> None:
        lease = self.leases.find(key)
        assert lease is not None
        if lease.state is LeaseState.RESERVED:
            table = BlockTable()
            if not self.producer_pool.grow(table, PROMPT_BLOCKS):
                return
            self.producer_pool.retain(table.ids(), Holder.LEASE)
            self.leases.start(key, table.ids())
            self.producer_pool.release(table)
        done = self.progress[key]
        if done > PROMPT_BLOCKS:
            return
        stop = min(done + num, PROMPT_BLOCKS)
        for i in range(done, stop):
            self.given[lease.blocks[i]] = (key, i)
        is_last = stop == PROMPT_BLOCKS
        digests = tuple(BlockDigest(b, (b,)) for b in lease.blocks[done:stop])
        num_announced = len(lease.announcements)
        first_tokens = (TOKEN,) if is_last else ()
        update = SequenceUpdate(
            prefill_of(key), stop, 0, 0, digests=digests, handed_over=is_last, first_tokens=first_tokens
        )
        effects = self.leases.on_chunk(prefill_of(key), update, self.now)
        has_announced = len(lease.announcements) > num_announced
        assert has_announced == (stop > done or is_last)
        assert len(effects) == (has_announced and lease.consumer is not None)
        self.progress[key] = PROMPT_BLOCKS + 1 if is_last else stop
        self.to_consumer.extend(x.message for x in effects if isinstance(x, SendAnnouncement))

    def release(self, key: HandoffKey) -> None:
        self.end_lease(key, lambda: self.leases.on_release(key, self.now))

    def recall(self, key: HandoffKey) -> None:
        self.end_lease(key, lambda: self.leases.on_revoke(key, self.now))

    def end_lease(self, key: HandoffKey, end: Callable[[], object]) -> None:
        others = {lease.key for lease in self.leases} - {key}
        was_open = self.leases.find(key) is not None
        end()
        assert others == {lease.key for lease in self.leases} - {key}, "a release ended another attempt"
        if was_open or key.attempt > self.newest.get(key.handoff, (0, 0.0))[0]:
            self.remember_end(key)
        self.recycle()

    def remember_end(self, key: HandoffKey) -> None:
        if key.attempt >= self.newest.get(key.handoff, (0, 0.0))[0]:
            self.newest[key.handoff] = (key.attempt, self.now)

    def recycle(self) -> None:
        """The worst case: free blocks are used for something else at once."""
        for block in self.producer_pool._free:
            self.given[block] = "recycled"

    def abandon(self, key: HandoffKey) -> None:
        """The job of a pull is cancelled; an ended one is not touched."""
        was_open = self.outcomes[key] == "open"
        effects = self.pulls.drop(job_of(key), ErrorKind.CANCELLED, "cancelled", self.now)
        assert [type(x) for x in effects] == [ReleaseHandoff, PullEnded] * was_open
        self.carry_out(effects)

    def end_read(self, read_id: int) -> None:
        read = self.reads[read_id]
        if not read.has_copied:
            for offered, mine in zip(read.order.offered, read.order.local, strict=True):
                self.taken[mine] = self.given[offered.block]
        right = [(read.key, index) for index in read.order.positions]
        if self.digests and [self.taken[b] for b in read.order.local] != right:
            pull = self.pulls.find(read.key)
            is_good = pull is not None and pull.lease_until is not None and self.now < pull.lease_until
            assert not is_good, f"{pull} finds other KV than was announced"
            self.fail_read(read_id, True)
            return
        del self.reads[read_id]
        self.carry_out(self.pulls.on_read_done(read_id, self.now))

    def fail_read(self, read_id: int, drained: bool) -> None:
        if drained:
            del self.reads[read_id]
        self.carry_out(self.pulls.on_read_failed(read_id, "failed", drained=drained, now=self.now))
        if not drained:
            # The transport cannot say when it will end; only the end of the peer can.
            self.lingers = True

    def lose_peer(self, proven: bool) -> None:
        self.torn = False
        if proven:
            self.reads.clear()
        self.lingers = bool(self.reads)
        self.carry_out(self.pulls.on_peer_lost(PRODUCER, "lost", proven=proven, now=self.now))
        assert not len(self.pulls)
        assert self.pulls.num_quarantined == sum(len(r.order.local) for r in self.reads.values())

    def carry_out(self, effects: Iterable[ConsumerEffect]) -> None:
        for effect in effects:
            match effect:
                case StartRead():
                    self.start_read(effect)
                case PullEnded(job=ResumeJob() as job):
                    self.end_pull(job.offer, effect)
                case ReleaseHandoff(_, key):
                    self.to_producer.append(("release", (key,), self.now))
                case TearDownPeer():
                    assert not self.torn, "torn down twice"
                    self.torn = self.lingers = True

    def start_read(self, order: StartRead) -> None:
        key = next(k for k, table in self.tables.items() if set(order.local) <= set(table.ids()))
        assert self.outcomes[key] == "open"
        assert order.local == tuple(self.tables[key].ids()[index] for index in order.positions)
        assert order.positions[0] >= self.hits[key] and len(order.offered) == len(order.local) > 0
        self.reads[order.read] = Read(order, key)

    def end_pull(self, key: HandoffKey, ended: PullEnded) -> None:
        assert self.outcomes[key] == "open", f"{key} ended twice: {self.outcomes[key]}, {ended}"
        self.outcomes[key] = "arrived" if ended.kind is None else "lost"
        table = self.tables.pop(key, BlockTable())
        if ended.kind is None:
            times = ended.times
            assert ended.first_tokens == (TOKEN,) and times.num_blocks == PROMPT_BLOCKS - self.hits[key]
            assert times.first_announced_at <= times.last_announced_at <= times.ready_at and times.busy_s >= 0
            content = [self.taken[b] for b in table.ids(PROMPT_BLOCKS)]
            assert content == [(key, i) for i in range(PROMPT_BLOCKS)], "wrong KV was accepted"
        self.consumer_pool.release(table)


class TrustingHandoffMachine(HandoffMachine):
    """Without digests."""

    digests = False


def test_a_consumer_that_stalls_longer_than_its_follow_is_remembered() -> None:
    """Found by the machine: the lease was renewed for ever, and announced to nobody."""
    machine = HandoffMachine()
    machine.new_attempt("a", False)
    machine.stream_flows()
    machine.time_passes(MEMORY_S)
    machine.submit(HandoffKey(HandoffId("a"), 1))
    machine.teardown()
    assert set(machine.outcomes.values()) == {"lost"}


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = effort(100, 70)
TestTrustingHandoff = pytest.mark.slow(TrustingHandoffMachine.TestCase)
TestTrustingHandoff.settings = effort(100, 70)
