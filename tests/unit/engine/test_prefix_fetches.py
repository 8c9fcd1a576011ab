"""Test two engines message by message, one of which fetches a prefix from the other: which messages they exchange,
which jobs wait, and what is left when a message is lost, late or repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind
from tandem.core.events import Cancelled, Finished, JobEvent, KVReceived, Token
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, RemotePrefix, Request, ResumeJob, SamplingParams
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    JobEnded,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendHandoffEnded,
    StartRead,
)
from tandem.engine.engine import Engine
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import RemotePrefixRequest
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import StepPlan
from tests.property.model import KVStore, ModelExecutor, expected_output

PRODUCER = WorkerRef(WorkerId("producer"), Incarnation(1), "producer:1")
CONSUMER = WorkerRef(WorkerId("consumer"), Incarnation(1), "consumer:1")
KEY = HandoffKey(HandoffId("fetch"), 1)
PROMPT = tuple(range(1, 14))
"""Seven blocks of two tokens, six of which a hit may be."""


class Side:
    """One engine on a model double. `do` records the effects of a call."""

    def __init__(self, num_blocks: int = 40, num_host_slots: int = 0, max_num_seqs: int = 4) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=max_num_seqs, max_model_len=64)
        self.pool = BlockPool(num_blocks, 2, num_host_slots=num_host_slots)
        self.engine = Engine(self.pool, limits, HandoffConfig(lease_s=10.0, pull_timeout_s=20.0), "model")
        self.store = KVStore(num_blocks, 2, num_host_slots)
        self.executor = ModelExecutor(self.store)
        self.effects: list[Effect] = []
        self.plans: list[StepPlan] = []

    def do(self, effects: list[Effect]) -> list[Effect]:
        self.effects += effects
        self.engine.check()
        return effects

    def step(self, now: float) -> bool:
        plan, effects = self.engine.begin(now)
        self.do(effects)
        if plan is not None:
            self.plans.append(plan)
            self.do(self.engine.finish(self.executor.execute(plan), now))
        return plan is not None

    def run(self, now: float = 0.0) -> None:
        while self.step(now):
            pass

    def events(self, name: str, kind: type) -> list[object]:
        sent = [x for x in self.effects if isinstance(x, JobEvent)]
        return [event for event in sent if isinstance(event, kind) and event.key.request == name]

    @property
    def is_clean(self) -> bool:
        books = self.engine.books()
        return self.engine.is_idle and books.num_free_blocks == books.num_blocks and not self.engine.is_transferring


def request(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 2) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Request(id=RequestId(name), model="m", prompt_tokens=prompt, sampling=sampling)


def consumer(name: str = "b", attempt: int = 1, num_blocks: int = 6, **facts: object) -> GenerateJob:
    prefix = RemotePrefix(handoff=KEY.handoff, source=PRODUCER, num_blocks=num_blocks)
    return GenerateJob(request=request(name), attempt=attempt, prefix=prefix, **facts)  # type: ignore[arg-type]


class Two:
    """A producer that has PROMPT, and a consumer. Messages pass only when a test carries them."""

    def __init__(self, producer: Side | None = None, consumer: Side | None = None) -> None:
        self.producer, self.consumer = producer or Side(), consumer or Side()
        self.producer.do(self.producer.engine.submit(GenerateJob(request=request("a"), attempt=1), 0.0))
        self.producer.run()
        self.producer.plans.clear()
        self.now = 1.0

    def submit(self, job: Job) -> list[Effect]:
        return self.consumer.do(self.consumer.engine.submit(job, self.now))

    def to_producer(self, effects: list[Effect]) -> list[Effect]:
        """Carry the consumer's messages to the producer, and renew the consumer's lease; return the producer's
        effects."""
        replies: list[Effect] = []
        for effect in effects:
            if isinstance(effect, FollowHandoff):
                replies += self.producer.do(
                    self.producer.engine.follow(effect.key, CONSUMER, self.now, effect.prefix_request)
                )
                self.consumer.engine.renewed((effect.key,), self.now, 10.0)
            elif isinstance(effect, ReleaseHandoff):
                self.producer.do(self.producer.engine.release(effect.key, self.now, is_taken=effect.is_taken))
        return replies

    def digest(self) -> list[Effect]:
        """Run the producer, and return the effects of its steps."""
        before = len(self.producer.effects)
        self.producer.run(self.now)
        return self.producer.effects[before:]

    def to_consumer(self, effects: list[Effect]) -> list[Effect]:
        """Carry the producer's messages to the consumer; return the consumer's effects."""
        replies: list[Effect] = []
        for effect in effects:
            if isinstance(effect, SendAnnouncement):
                replies += self.consumer.do(self.consumer.engine.announced(effect.message, self.now))
            elif isinstance(effect, SendHandoffEnded):
                ended = self.consumer.engine.handoff_ended(effect.key, effect.kind, effect.message, self.now)
                replies += self.consumer.do(ended)
        return replies

    def read(self, effects: list[Effect]) -> list[Effect]:
        """Carry out the reads; return the consumer's effects."""
        replies: list[Effect] = []
        for read in [x for x in effects if isinstance(x, StartRead)]:
            for offered, mine in zip(read.offered, read.local, strict=True):
                self.consumer.store.cells[mine] = list(self.producer.store.cells[offered.block])
                assert self.consumer.store.digest(mine) == offered.heads
            replies += self.consumer.do(self.consumer.engine.read_done(read.read, self.now))
        return replies

    def fetch(self, job: Job) -> list[Effect]:
        """Run a whole remote prefix fetch; return the consumer's last effects."""
        effects = self.submit(job)
        return self.read(self.to_consumer([*self.to_producer(effects), *self.digest()]))

    def finish(self, name: str, num_cached: int) -> None:
        """Run the consumer to its end, and check its tokens."""
        self.to_producer([x for x in self.consumer.effects if isinstance(x, ReleaseHandoff)])
        self.consumer.run(self.now)
        self.producer.run(self.now)
        (end,) = self.consumer.events(name, Finished)
        assert isinstance(end, Finished) and end.num_cached_tokens == num_cached
        tokens = [e.token.id for e in self.consumer.events(name, Token) if isinstance(e, Token)]
        assert tuple(tokens) == expected_output(GenerateJob(request=request(name), attempt=1))[0]
        assert self.consumer.is_clean and self.producer.is_clean


def follow_of(effects: list[Effect]) -> FollowHandoff:
    (only,) = effects
    assert isinstance(only, FollowHandoff)
    return only


def test_a_prefix_fetch_is_requested_digested_read_and_then_a_cache_hit() -> None:
    two = Two()
    follow = follow_of(effects := two.submit(consumer()))
    assert follow.prefix_request is not None and (
        follow.prefix_request.first_index,
        len(follow.prefix_request.hashes),
    ) == (0, 6)
    assert not two.consumer.step(1.0) and two.consumer.engine.load().num_queued_tokens == 1
    assert two.to_producer(effects) == [] and two.producer.engine.books().num_leased_blocks == 6
    replies = two.digest()
    (plan,) = two.producer.plans
    assert [index for _, index in plan.digests] == list(range(6)) and not plan.slices
    reads = two.to_consumer(replies)
    assert two.consumer.engine.books().num_reading_blocks == 6 and two.consumer.engine.books().num_pulls == 1
    release, emitted = two.read(reads)
    assert release == ReleaseHandoff(PRODUCER, KEY)
    assert isinstance(emitted, KVReceived)
    assert (emitted.source, emitted.num_blocks, emitted.num_cached_tokens) == (PRODUCER, 6, 0)
    assert two.consumer.engine.load().num_remote_hit_tokens == 12
    two.finish("b", 12)
    assert sum(plan.num_tokens for plan in two.consumer.plans) == 2


def test_only_what_is_not_here_is_read_and_the_producer_holds_what_that_stands_on() -> None:
    two = Two()
    two.submit(GenerateJob(request=request("c", (*PROMPT[:5], 30, 30)), attempt=1))
    two.consumer.run()
    follow = follow_of(effects := two.submit(consumer()))
    assert follow.prefix_request is not None and follow.prefix_request.first_index == 2
    replies = [*two.to_producer(effects), *two.digest()]
    assert two.producer.engine.books().num_leased_blocks == 6
    (announced,) = replies
    assert isinstance(announced, SendAnnouncement) and announced.message.first_index == 2
    assert announced.message.is_last and announced.message.num_computed == 12 and len(announced.message.blocks) == 4
    two.read(two.to_consumer(replies))
    two.finish("b", 12)


@pytest.mark.parametrize("num_blocks", [1, 3, 100])
def test_no_more_is_read_than_announced_and_than_can_be_a_hit(num_blocks: int) -> None:
    two = Two()
    two.fetch(consumer(num_blocks=num_blocks))
    two.finish("b", 2 * min(6, num_blocks))


def test_local_blocks_are_not_requested() -> None:
    two = Two()
    two.submit(GenerateJob(request=request("c"), attempt=1))
    two.consumer.run()
    assert two.submit(consumer()) == []
    two.finish("b", 12)


def test_what_scores_its_prompt_computes_it() -> None:
    two = Two()
    job = consumer()
    assert two.submit(replace(job, request=replace(job.request, prompt_logprobs=1))) == []


def test_a_source_without_blocks_ends_the_fetch_at_once() -> None:
    two = Two(producer=Side())
    job = consumer()
    (end,) = two.to_producer(two.submit(replace(job, request=replace(job.request, cache_salt="another tenant's"))))
    assert isinstance(end, SendHandoffEnded) and end.kind is ErrorKind.KV_LOST
    assert two.producer.is_clean
    assert two.to_consumer([end]) == [ReleaseHandoff(PRODUCER, KEY)]
    two.consumer.run(1.0)
    assert [e.num_cached_tokens for e in two.consumer.events("b", Finished) if isinstance(e, Finished)] == [0]


def test_a_source_serves_held_and_free_blocks() -> None:
    """A sequence runs on the first blocks at the producer; the leases of two fetches hold all of them twice."""
    two = Two()
    runs = GenerateJob(request=request("r", (*PROMPT[:6], 20, 21), max_tokens=30), attempt=1)
    two.producer.do(two.producer.engine.submit(runs, 1.0))
    two.producer.step(1.0)
    effects = two.submit(consumer())
    other = replace(consumer("c"), prefix=RemotePrefix(handoff=HandoffId("other"), source=PRODUCER, num_blocks=6))
    effects += two.submit(other)
    replies = two.to_producer(effects)
    assert two.producer.engine.books().num_leased_blocks == 6 and two.producer.engine.books().num_leases == 2
    before = len(two.producer.effects)
    for _ in range(4):
        two.producer.step(1.0)
    # Every second plan is for them alone, and what runs goes on in between.
    assert [bool(plan.digests) for plan in two.producer.plans] == [False, True, False, False, False]
    assert all(bool(plan.digests) != bool(plan.slices) for plan in two.producer.plans)
    two.read(two.to_consumer([*replies, *two.producer.effects[before:]]))
    two.producer.do(two.producer.engine.cancel(runs.key, 1.0))
    two.consumer.run(1.0)
    two.finish("b", 12)
    two.finish("c", 12)


@pytest.mark.parametrize(("num_blocks", "num_served"), [(16, 6), (12, 4), (9, 1), (8, 0)])
def test_blocks_reserved_for_the_largest_pull_are_not_used(num_blocks: int, num_served: int) -> None:
    two = Two(producer=Side(num_blocks=num_blocks))
    pull = ResumeJob(request=request("p", max_tokens=3), attempt=1, handoff=HandoffId("p"), source=CONSUMER)
    two.producer.do(two.producer.engine.submit(pull, 1.0))
    assert two.producer.engine.load().num_reserved_blocks == 8
    replies = [*two.to_producer(two.submit(consumer())), *two.digest()]
    assert two.producer.engine.books().num_leased_blocks == num_served
    two.read(two.to_consumer(replies))
    two.producer.do(two.producer.engine.cancel(pull.key, 1.0))
    two.finish("b", 2 * num_served)


def test_a_consumer_does_not_read_into_the_block_that_a_running_sequence_needs_next() -> None:
    two = Two(consumer=Side(num_blocks=12))
    two.submit(GenerateJob(request=request("r", tuple(range(30, 42))), attempt=1))
    two.consumer.step(1.0)
    two.consumer.step(1.0)
    assert two.consumer.engine.load().num_free_blocks == 6
    assert two.submit(consumer()) == []
    two.finish("b", 0)


def test_a_consumer_does_not_read_into_reserved_blocks() -> None:
    two = Two(consumer=Side(num_blocks=8))
    pull = ResumeJob(request=request("p", PROMPT[:3]), attempt=1, handoff=HandoffId("p"), source=PRODUCER)
    two.submit(pull)
    assert two.consumer.engine.load().num_reserved_blocks == 3
    assert two.submit(consumer()) == []
    two.consumer.do(two.consumer.engine.cancel(pull.key, 1.0))
    two.finish("b", 0)


def test_others_go_ahead_of_a_job_that_waits_for_its_prefix() -> None:
    """Check this also with one seat, and for a job that arrives later and is less urgent."""
    two = Two(consumer=Side(max_num_seqs=1))
    effects = two.submit(consumer())
    other = GenerateJob(request=replace(request("c", (9, 9, 9)), priority=5), attempt=1)
    two.submit(other)
    two.consumer.run(1.0)
    assert two.consumer.events("c", Finished) and not two.consumer.events("b", Token)
    two.read(two.to_consumer([*two.to_producer(effects), *two.digest()]))
    two.finish("b", 12)


def test_a_full_worker_reads_only_once_what_stood_there_is_copied_to_host_memory() -> None:
    two = Two(consumer=Side(num_blocks=10, num_host_slots=10))
    cached = GenerateJob(request=request("c", tuple(range(20, 38)), max_tokens=1), attempt=1)
    two.submit(cached)
    two.consumer.run(1.0)
    assert two.consumer.engine.books().num_cached_blocks == 9
    replies = [*two.to_producer(two.submit(consumer())), *two.digest()]
    assert two.to_consumer(replies) == [], "no read may write there yet"
    plan, _ = two.consumer.engine.begin(1.0)
    assert plan is not None and plan.spills and not plan.slices
    reads = two.consumer.do(two.consumer.engine.finish(two.consumer.executor.execute(plan), 1.0))
    assert [type(x) for x in reads] == [StartRead]
    two.read(reads)
    two.finish("b", 12)
    two.submit(replace(cached, request=replace(cached.request, id=RequestId("d"))))
    two.consumer.run(1.0)
    (end,) = two.consumer.events("d", Finished)
    assert isinstance(end, Finished) and end.num_cached_tokens > 0, "what was copied is right"


def in_host_memory(num_blocks: int = 12) -> Two:
    """Return a producer that has PROMPT in host memory only."""
    two = Two(producer=Side(num_blocks=num_blocks, num_host_slots=20))
    other = request("other", tuple(range(20, 20 + 2 * num_blocks - 1)), max_tokens=1)
    two.producer.do(two.producer.engine.submit(GenerateJob(request=other, attempt=1), 0.5))
    two.producer.run(0.5)
    two.producer.plans.clear()
    books = two.producer.engine.books()
    assert books.num_host_blocks >= 6 and books.num_free_blocks == num_blocks
    return two


def test_a_prefix_in_host_memory_is_copied_back_and_served() -> None:
    two = in_host_memory()
    replies = [*two.to_producer(two.submit(consumer())), *two.digest()]
    assert [plan for plan in two.producer.plans if plan.fills], "the copies are made before the digests"
    two.read(two.to_consumer(replies))
    two.finish("b", 12)
    assert two.producer.is_clean and two.producer.engine.books().num_table_blocks == 0


def test_a_prefix_whose_lease_ends_during_its_copies_is_freed_after_them() -> None:
    two = in_host_memory()
    two.to_producer(two.submit(consumer()))
    plan, _ = two.producer.engine.begin(two.now)
    assert plan is not None and plan.fills
    two.producer.do(two.producer.engine.release(KEY, two.now))
    assert two.producer.engine.books().num_table_blocks > 0, "the step still writes to these blocks"
    two.producer.do(two.producer.engine.finish(two.producer.executor.execute(plan), two.now))
    two.producer.run(two.now)
    assert two.producer.is_clean and two.producer.engine.books().num_table_blocks == 0


def test_a_prefix_in_host_memory_is_served_as_far_as_there_is_room() -> None:
    two = in_host_memory()
    busy = request("busy", tuple(range(50, 50 + 17)), max_tokens=6)
    two.producer.do(two.producer.engine.submit(GenerateJob(request=busy, attempt=1), two.now))
    for _ in range(4):
        two.producer.step(two.now)
    num_free = two.producer.engine.books().num_free_blocks
    assert num_free < 6
    two.to_producer(two.submit(consumer()))
    assert two.producer.engine.books().num_leased_blocks < 6
    assert two.producer.engine.books().num_free_blocks >= 1, "the next block of the running sequence"


def lose_source(two: Two) -> list[Effect]:
    return two.consumer.engine.source_lost(PRODUCER, "gone", two.now)


def let_time_pass(two: Two) -> list[Effect]:
    two.now += 2.0
    return two.consumer.engine.tick(two.now)


@pytest.mark.parametrize("stage", ["asked", "announced", "under read"])
@pytest.mark.parametrize("failure", [lose_source, let_time_pass])
def test_whatever_fails_the_job_is_computed_here(stage: str, failure: Callable[[Two], list[Effect]]) -> None:
    two = Two()
    effects = two.submit(consumer())
    reads: list[Effect] = []
    if stage != "asked":
        replies = [*two.to_producer(effects), *two.digest()]
        reads = two.to_consumer(replies) if stage == "under read" else []
    assert ReleaseHandoff(PRODUCER, KEY) in two.consumer.do(failure(two))
    two.to_producer([ReleaseHandoff(PRODUCER, KEY)])
    assert two.consumer.engine.books().num_reading_blocks == (6 if reads else 0)
    two.consumer.run(two.now)
    for read in [x for x in reads if isinstance(x, StartRead)]:
        two.consumer.do(two.consumer.engine.read_done(read.read, two.now))
    two.finish("b", 0)


def test_a_digest_that_is_wrong_costs_the_prefix_fetch_alone() -> None:
    two = Two()
    (read,) = two.to_consumer([*two.to_producer(two.submit(consumer())), *two.digest()])
    assert isinstance(read, StartRead)
    two.consumer.do(two.consumer.engine.read_failed(read.read, "digests differ", drained=True, now=two.now))
    two.finish("b", 0)


def test_blocks_that_cannot_be_digested_are_not_served() -> None:
    two = Two()
    replies = two.to_producer(two.submit(consumer()))
    plan, _ = two.producer.engine.begin(1.0)
    assert plan is not None and plan.digests
    failed = replace(two.producer.executor.execute(plan), digests=())
    replies += two.producer.do(two.producer.engine.finish(failed, 1.0))
    (end,) = replies
    assert isinstance(end, SendHandoffEnded)
    two.to_consumer(replies)
    two.finish("b", 0)


@pytest.mark.parametrize("is_under_read", [False, True])
def test_cancel_and_a_newer_attempt_end_the_prefix_fetch(is_under_read: bool) -> None:
    two = Two()
    effects = two.submit(consumer())
    reads = two.to_consumer([*two.to_producer(effects), *two.digest()]) if is_under_read else []
    newer = two.submit(consumer(attempt=2))
    key = HandoffKey(KEY.handoff, 2)
    assert [type(x) for x in newer] == [ReleaseHandoff, JobEnded, Cancelled, FollowHandoff] and newer[
        0
    ] == ReleaseHandoff(PRODUCER, KEY)
    # The newer attempt may be heard of first.
    two.to_producer([newer[3], newer[0]])
    assert two.producer.engine.books().num_leases == 1
    assert two.consumer.engine.books().num_reading_blocks == (6 if is_under_read else 0)
    ended = two.consumer.do(two.consumer.engine.cancel(consumer(attempt=2).key, 1.0))
    release, done, event = ended
    assert release == ReleaseHandoff(PRODUCER, key) and event == Cancelled(consumer(attempt=2).key)
    assert isinstance(done, JobEnded) and done.times.pull is not None and done.times.pull.outcome == "cancelled"
    two.to_producer(ended)
    for read in [x for x in reads if isinstance(x, StartRead)]:
        two.consumer.do(two.consumer.engine.read_done(read.read, 1.0))
    two.producer.run(1.0)
    assert two.consumer.is_clean and two.producer.is_clean


def test_two_jobs_that_name_one_prefix_fetch_do_not_share_it() -> None:
    two = Two()
    effects = two.submit(consumer("b"))
    assert two.submit(consumer("c")) == []
    two.read(two.to_consumer([*two.to_producer(effects), *two.digest()]))
    two.finish("b", 12)
    (end,) = two.consumer.events("c", Finished)
    assert isinstance(end, Finished) and end.num_cached_tokens == 12
    # What is still said of it must not be taken for what a later job asks for under the same name.
    other = consumer("d")
    assert two.submit(replace(other, request=replace(other.request, cache_salt="other"))) == []


def test_a_fetch_is_not_announced_to_another_request_under_the_same_key() -> None:
    """Two gateways may choose the same key: KV of another prompt must not be published under this prompt's hashes."""
    two = Two()
    served = two.to_producer(two.submit(consumer("b")))
    served += two.digest()
    third = Side()
    job = consumer("c")
    follow = follow_of(third.do(third.engine.submit(replace(job, request=request("c", PROMPT[2:])), 1.0)))
    (end,) = two.producer.do(two.producer.engine.follow(KEY, PRODUCER, 1.0, follow.prefix_request))
    assert isinstance(end, SendHandoffEnded)
    (end,) = two.producer.do(two.producer.engine.follow(KEY, PRODUCER, 1.0))
    assert isinstance(end, SendHandoffEnded), "nor to a Resume"
    two.read(two.to_consumer(served))
    two.finish("b", 12)


def test_choices_share_a_prefix_fetch_and_each_may_be_cancelled() -> None:
    two = Two()
    effects = two.submit(consumer(num_choices=3))
    first, *_ = consumer(num_choices=3).keys
    assert two.consumer.do(two.consumer.engine.cancel(first, 1.0)) == [Cancelled(first)]
    replies = two.read(two.to_consumer([*two.to_producer(effects), *two.digest()]))
    (pulled,) = [x for x in replies if isinstance(x, JobEvent)]
    assert isinstance(pulled, KVReceived) and pulled.key.choice == 1
    two.to_producer(replies)
    two.consumer.run(1.0)
    assert len(two.consumer.events("b", Finished)) == 2 and two.consumer.is_clean and two.producer.is_clean


def test_a_prefix_fetch_followed_twice_is_announced_twice_and_leased_once() -> None:
    two = Two()
    effects = two.submit(consumer())
    replies = [*two.to_producer(effects), *two.digest()]
    again = two.to_producer(effects)
    assert again == replies and two.producer.engine.books().num_leases == 1
    reads = two.to_consumer([*replies, *again])
    two.read(reads)
    assert len([x for x in reads if isinstance(x, StartRead)]) == 1
    # It comes once more after the release: then it is over.
    two.to_producer([ReleaseHandoff(PRODUCER, KEY)])
    (end,) = two.to_producer(effects)
    assert isinstance(end, SendHandoffEnded) and two.to_consumer([end]) == []
    two.finish("b", 12)


def test_a_prefix_fetch_that_nobody_renews_lapses() -> None:
    two = Two()
    two.to_producer(two.submit(consumer()))
    assert two.producer.engine.next_deadline() == 11.0
    effects = two.producer.do(two.producer.engine.tick(11.0))
    assert [type(x) for x in effects] == [SendHandoffEnded]
    two.producer.run(11.0)
    assert two.producer.is_clean, "nothing is digested any more"


def test_a_prefix_fetch_under_the_key_of_a_hand_off_is_rejected() -> None:
    two = Two()
    prefill = PrefillJob(request=request("p", (7, 7, 7)), attempt=1, handoff=KEY.handoff)
    two.producer.do(two.producer.engine.submit(prefill, 1.0))
    prefix_request = RemotePrefixRequest(0, tuple(two.producer.pool._index.all()))
    effects = two.producer.do(two.producer.engine.follow(HandoffKey(KEY.handoff, 2), CONSUMER, 1.0, prefix_request))
    assert effects == [] and two.producer.engine.books().num_leases == 1
    two.producer.run(1.0)
    assert two.producer.events("p", Finished)


def test_a_prefix_fetch_is_renewed_like_any_pull() -> None:
    two = Two()
    replies = [*two.to_producer(two.submit(consumer())), *two.digest()]
    two.now = 2.9
    reads = two.to_consumer(replies)
    assert two.consumer.engine.tick(4.4) == [RenewLeases(PRODUCER, (KEY,))]
    two.read(reads)
    two.finish("b", 12)


def test_a_consumer_that_drains_gives_the_job_and_the_prefix_fetch_back() -> None:
    two = Two()
    two.to_producer(two.submit(consumer()))
    effects = two.consumer.do(two.consumer.engine.start_drain(1.0))
    assert ReleaseHandoff(PRODUCER, KEY) in effects
    two.to_producer(effects)
    two.producer.run(1.0)
    assert two.consumer.is_clean and two.producer.is_clean
