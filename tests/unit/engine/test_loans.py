"""Two engines by hand, one of which borrows a prefix of the other: what they say to each other, whom it makes wait,
and what is left when something does not come, comes late, or comes twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind
from tandem.core.events import Cancelled, Finished, Pulled, Token
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.request import Generate, Job, Prefill, RemotePrefix, Request, Resume, SamplingParams
from tandem.engine.effects import Announce, Effect, Emit, Ended, EndHandoff, Follow, Renew, Unfollow
from tandem.engine.engine import Engine, HandoffLimits
from tandem.kv.handoff import Borrow
from tandem.kv.pool import BlockPool
from tandem.kv.pull_outcome import StartRead
from tandem.sched.plan import StepPlan
from tandem.sched.policy import SchedulerLimits
from tests.property.model import KVStore, ModelExecutor, expected_output

GIVER = WorkerRef(WorkerId("giver"), Incarnation(1), "giver:1")
TAKER = WorkerRef(WorkerId("taker"), Incarnation(1), "taker:1")
KEY = HandoffKey(HandoffId("loan"), 1)
PROMPT = tuple(range(1, 14))
"""Seven blocks of two tokens, six of which a hit may be."""


class Side:
    """An engine on a model of a model. `do` runs a call and keeps what is to be done."""

    def __init__(self, num_blocks: int = 40, num_host_slots: int = 0, max_num_seqs: int = 4) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=max_num_seqs, max_model_len=64)
        self.pool = BlockPool(num_blocks, 2, num_host_slots=num_host_slots)
        self.engine = Engine(self.pool, limits, HandoffLimits(lease_s=10.0, pull_timeout_s=20.0), "model")
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
        told = [x.event for x in self.effects if isinstance(x, Emit)]
        return [event for event in told if isinstance(event, kind) and event.key.request == name]

    @property
    def is_clean(self) -> bool:
        books = self.engine.books()
        return self.engine.is_idle and books.num_free_blocks == books.num_blocks and not self.engine.is_moving


def request(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 2) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Request(id=RequestId(name), model="m", prompt_tokens=prompt, sampling=sampling)


def borrower(name: str = "b", attempt: int = 1, num_blocks: int = 6, **facts: object) -> Generate:
    prefix = RemotePrefix(handoff=KEY.handoff, source=GIVER, num_blocks=num_blocks)
    return Generate(request=request(name), attempt=attempt, prefix=prefix, **facts)  # type: ignore[arg-type]


class Two:
    """A giver that has PROMPT, and a taker. Messages pass when a test says so."""

    def __init__(self, giver: Side | None = None, taker: Side | None = None) -> None:
        self.giver, self.taker = giver or Side(), taker or Side()
        self.giver.do(self.giver.engine.submit(Generate(request=request("a"), attempt=1), 0.0))
        self.giver.run()
        self.giver.plans.clear()
        self.now = 1.0

    def submit(self, job: Job) -> list[Effect]:
        return self.taker.do(self.taker.engine.submit(job, self.now))

    def ask(self, effects: list[Effect]) -> list[Effect]:
        """Carry what the taker says to the giver, and the lease that this grants back."""
        told: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Follow):
                told += self.giver.do(self.giver.engine.follow(effect.key, TAKER, self.now, effect.borrow))
                self.taker.engine.renewed((effect.key,), self.now, 10.0)
            elif isinstance(effect, Unfollow):
                self.giver.do(self.giver.engine.release(effect.key, self.now, is_taken=effect.is_taken))
        return told

    def digest(self) -> list[Effect]:
        """Let the giver work, and return what it says of it."""
        before = len(self.giver.effects)
        self.giver.run(self.now)
        return self.giver.effects[before:]

    def tell(self, effects: list[Effect]) -> list[Effect]:
        """Carry what the giver says to the taker; returns what that wants done."""
        told: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Announce):
                told += self.taker.do(self.taker.engine.announced(effect.message, self.now))
            elif isinstance(effect, EndHandoff):
                ended = self.taker.engine.handoff_ended(effect.key, effect.kind, effect.message, self.now)
                told += self.taker.do(ended)
        return told

    def read(self, effects: list[Effect]) -> list[Effect]:
        """Carry reads out."""
        told: list[Effect] = []
        for read in [x for x in effects if isinstance(x, StartRead)]:
            for offered, mine in zip(read.offered, read.local, strict=True):
                self.taker.store.cells[mine] = list(self.giver.store.cells[offered.block])
                assert self.taker.store.digest(mine) == offered.heads
            told += self.taker.do(self.taker.engine.read_done(read.read, self.now))
        return told

    def lend(self, job: Job) -> list[Effect]:
        """All of a loan; returns what the taker says in the end."""
        effects = self.submit(job)
        return self.read(self.tell([*self.ask(effects), *self.digest()]))

    def finish(self, name: str, num_cached: int) -> None:
        """What the taker has left to do, and that its tokens are right."""
        self.ask([x for x in self.taker.effects if isinstance(x, Unfollow)])
        self.taker.run(self.now)
        self.giver.run(self.now)
        (end,) = self.taker.events(name, Finished)
        assert isinstance(end, Finished) and end.num_cached_tokens == num_cached
        tokens = [e.token.id for e in self.taker.events(name, Token) if isinstance(e, Token)]
        assert tuple(tokens) == expected_output(Generate(request=request(name), attempt=1))[0]
        assert self.taker.is_clean and self.giver.is_clean


def follow_of(effects: list[Effect]) -> Follow:
    (only,) = effects
    assert isinstance(only, Follow)
    return only


def test_a_loan_is_asked_for_digested_read_and_then_a_hit_like_any_other() -> None:
    two = Two()
    follow = follow_of(effects := two.submit(borrower()))
    assert follow.borrow is not None and (follow.borrow.first_index, len(follow.borrow.hashes)) == (0, 6)
    assert not two.taker.step(1.0) and two.taker.engine.load().num_queued_tokens == 1
    assert two.ask(effects) == [] and two.giver.engine.books().num_leased_blocks == 6
    told = two.digest()
    (plan,) = two.giver.plans
    assert [index for _, index in plan.digests] == list(range(6)) and not plan.slices
    reads = two.tell(told)
    assert two.taker.engine.books().num_reading_blocks == 6 and two.taker.engine.books().num_pulls == 1
    unfollow, emitted = two.read(reads)
    assert unfollow == Unfollow(GIVER, KEY)
    assert isinstance(emitted, Emit) and isinstance(emitted.event, Pulled)
    assert (emitted.event.source, emitted.event.num_blocks, emitted.event.num_cached_tokens) == (GIVER, 6, 0)
    assert two.taker.engine.load().num_borrowed_tokens == 12
    two.finish("b", 12)
    assert sum(plan.num_tokens for plan in two.taker.plans) == 2


def test_only_what_is_not_here_is_read_and_the_giver_holds_what_that_stands_on() -> None:
    two = Two()
    two.submit(Generate(request=request("c", (*PROMPT[:5], 30, 30)), attempt=1))
    two.taker.run()
    follow = follow_of(effects := two.submit(borrower()))
    assert follow.borrow is not None and follow.borrow.first_index == 2
    told = [*two.ask(effects), *two.digest()]
    assert two.giver.engine.books().num_leased_blocks == 6
    (announced,) = told
    assert isinstance(announced, Announce) and announced.message.first_index == 2
    assert announced.message.is_last and announced.message.num_computed == 12 and len(announced.message.blocks) == 4
    two.read(two.tell(told))
    two.finish("b", 12)


@pytest.mark.parametrize("num_blocks", [1, 3, 100])
def test_no_more_is_read_than_was_said_and_than_can_be_a_hit(num_blocks: int) -> None:
    two = Two()
    two.lend(borrower(num_blocks=num_blocks))
    two.finish("b", 2 * min(6, num_blocks))


def test_what_is_here_is_not_asked_for() -> None:
    two = Two()
    two.submit(Generate(request=request("c"), attempt=1))
    two.taker.run()
    assert two.submit(borrower()) == []
    two.finish("b", 12)


def test_what_scores_its_prompt_computes_it() -> None:
    two = Two()
    job = borrower()
    assert two.submit(replace(job, request=replace(job.request, prompt_logprobs=1))) == []


def test_a_source_that_has_nothing_says_so_at_once() -> None:
    two = Two(giver=Side())
    job = borrower()
    (end,) = two.ask(two.submit(replace(job, request=replace(job.request, cache_salt="another tenant's"))))
    assert isinstance(end, EndHandoff) and end.kind is ErrorKind.KV_LOST
    assert two.giver.is_clean
    assert two.tell([end]) == [Unfollow(GIVER, KEY)]
    two.taker.run(1.0)
    assert [e.num_cached_tokens for e in two.taker.events("b", Finished) if isinstance(e, Finished)] == [0]


def test_a_source_that_lends_what_others_hold_and_what_nobody_does() -> None:
    """Somebody runs on the first blocks there; the leases of two loans hold all of them twice."""
    two = Two()
    runs = Generate(request=request("r", (*PROMPT[:6], 20, 21), max_tokens=30), attempt=1)
    two.giver.do(two.giver.engine.submit(runs, 1.0))
    two.giver.step(1.0)
    effects = two.submit(borrower())
    other = replace(borrower("c"), prefix=RemotePrefix(handoff=HandoffId("other"), source=GIVER, num_blocks=6))
    effects += two.submit(other)
    told = two.ask(effects)
    assert two.giver.engine.books().num_leased_blocks == 6 and two.giver.engine.books().num_leases == 2
    before = len(two.giver.effects)
    for _ in range(4):
        two.giver.step(1.0)
    # Every second plan is for them alone, and what runs goes on in between.
    assert [bool(plan.digests) for plan in two.giver.plans] == [False, True, False, False, False]
    assert all(bool(plan.digests) != bool(plan.slices) for plan in two.giver.plans)
    two.read(two.tell([*told, *two.giver.effects[before:]]))
    two.giver.do(two.giver.engine.cancel(runs.key, 1.0))
    two.taker.run(1.0)
    two.finish("b", 12)
    two.finish("c", 12)


@pytest.mark.parametrize(("num_blocks", "num_lent"), [(16, 6), (12, 4), (9, 1), (8, 0)])
def test_what_the_largest_pull_was_promised_is_not_lent(num_blocks: int, num_lent: int) -> None:
    two = Two(giver=Side(num_blocks=num_blocks))
    pull = Resume(request=request("p", max_tokens=3), attempt=1, handoff=HandoffId("p"), source=TAKER)
    two.giver.do(two.giver.engine.submit(pull, 1.0))
    assert two.giver.engine.load().num_promised_blocks == 8
    told = [*two.ask(two.submit(borrower())), *two.digest()]
    assert two.giver.engine.books().num_leased_blocks == num_lent
    two.read(two.tell(told))
    two.giver.do(two.giver.engine.cancel(pull.key, 1.0))
    two.finish("b", 2 * num_lent)


def test_a_taker_does_not_read_into_the_block_that_a_running_sequence_needs_next() -> None:
    two = Two(taker=Side(num_blocks=12))
    two.submit(Generate(request=request("r", tuple(range(30, 42))), attempt=1))
    two.taker.step(1.0)
    two.taker.step(1.0)
    assert two.taker.engine.load().num_free_blocks == 6
    assert two.submit(borrower()) == []
    two.finish("b", 0)


def test_a_taker_does_not_read_into_what_it_has_promised() -> None:
    two = Two(taker=Side(num_blocks=8))
    pull = Resume(request=request("p", PROMPT[:3]), attempt=1, handoff=HandoffId("p"), source=GIVER)
    two.submit(pull)
    assert two.taker.engine.load().num_promised_blocks == 3
    assert two.submit(borrower()) == []
    two.taker.do(two.taker.engine.cancel(pull.key, 1.0))
    two.finish("b", 0)


def test_others_go_ahead_of_a_job_that_waits_for_its_prefix() -> None:
    """Also where there is one seat, and where the other comes after it and is less urgent."""
    two = Two(taker=Side(max_num_seqs=1))
    effects = two.submit(borrower())
    other = Generate(request=replace(request("c", (9, 9, 9)), priority=5), attempt=1)
    two.submit(other)
    two.taker.run(1.0)
    assert two.taker.events("c", Finished) and not two.taker.events("b", Token)
    two.read(two.tell([*two.ask(effects), *two.digest()]))
    two.finish("b", 12)


def test_a_full_worker_reads_only_once_what_stood_there_is_copied_to_host_memory() -> None:
    two = Two(taker=Side(num_blocks=10, num_host_slots=10))
    cached = Generate(request=request("c", tuple(range(20, 38)), max_tokens=1), attempt=1)
    two.submit(cached)
    two.taker.run(1.0)
    assert two.taker.engine.books().num_cached_blocks == 9
    told = [*two.ask(two.submit(borrower())), *two.digest()]
    assert two.tell(told) == [], "no read may write there yet"
    plan, _ = two.taker.engine.begin(1.0)
    assert plan is not None and plan.spills and not plan.slices
    reads = two.taker.do(two.taker.engine.finish(two.taker.executor.execute(plan), 1.0))
    assert [type(x) for x in reads] == [StartRead]
    two.read(reads)
    two.finish("b", 12)
    two.submit(replace(cached, request=replace(cached.request, id=RequestId("d"))))
    two.taker.run(1.0)
    (end,) = two.taker.events("d", Finished)
    assert isinstance(end, Finished) and end.num_cached_tokens > 0, "what was copied is right"


def lose_source(two: Two) -> list[Effect]:
    return two.taker.engine.source_lost(GIVER, "gone", two.now)


def let_time_pass(two: Two) -> list[Effect]:
    two.now += 2.0
    return two.taker.engine.tick(two.now)


@pytest.mark.parametrize("stage", ["asked", "announced", "under read"])
@pytest.mark.parametrize("failure", [lose_source, let_time_pass])
def test_whatever_fails_the_job_is_computed_here(stage: str, failure: Callable[[Two], list[Effect]]) -> None:
    two = Two()
    effects = two.submit(borrower())
    reads: list[Effect] = []
    if stage != "asked":
        told = [*two.ask(effects), *two.digest()]
        reads = two.tell(told) if stage == "under read" else []
    assert Unfollow(GIVER, KEY) in two.taker.do(failure(two))
    two.ask([Unfollow(GIVER, KEY)])
    assert two.taker.engine.books().num_reading_blocks == (6 if reads else 0)
    two.taker.run(two.now)
    for read in [x for x in reads if isinstance(x, StartRead)]:
        two.taker.do(two.taker.engine.read_done(read.read, two.now))
    two.finish("b", 0)


def test_a_digest_that_is_wrong_costs_the_loan_alone() -> None:
    two = Two()
    (read,) = two.tell([*two.ask(two.submit(borrower())), *two.digest()])
    assert isinstance(read, StartRead)
    two.taker.do(two.taker.engine.read_failed(read.read, "digests differ", drained=True, now=two.now))
    two.finish("b", 0)


def test_blocks_that_cannot_be_digested_are_not_lent() -> None:
    two = Two()
    told = two.ask(two.submit(borrower()))
    plan, _ = two.giver.engine.begin(1.0)
    assert plan is not None and plan.digests
    failed = replace(two.giver.executor.execute(plan), digests=())
    told += two.giver.do(two.giver.engine.finish(failed, 1.0))
    (end,) = told
    assert isinstance(end, EndHandoff)
    two.tell(told)
    two.finish("b", 0)


@pytest.mark.parametrize("is_under_read", [False, True])
def test_cancel_and_a_newer_attempt_end_the_loan(is_under_read: bool) -> None:
    two = Two()
    effects = two.submit(borrower())
    reads = two.tell([*two.ask(effects), *two.digest()]) if is_under_read else []
    newer = two.submit(borrower(attempt=2))
    key = HandoffKey(KEY.handoff, 2)
    assert [type(x) for x in newer] == [Unfollow, Ended, Emit, Follow] and newer[0] == Unfollow(GIVER, KEY)
    # The newer attempt may be heard of first.
    two.ask([newer[3], newer[0]])
    assert two.giver.engine.books().num_leases == 1
    assert two.taker.engine.books().num_reading_blocks == (6 if is_under_read else 0)
    ended = two.taker.do(two.taker.engine.cancel(borrower(attempt=2).key, 1.0))
    unfollow, over, told = ended
    assert unfollow == Unfollow(GIVER, key) and told == Emit(Cancelled(borrower(attempt=2).key))
    assert isinstance(over, Ended) and over.times.pull is not None and over.times.pull.outcome == "cancelled"
    two.ask(ended)
    for read in [x for x in reads if isinstance(x, StartRead)]:
        two.taker.do(two.taker.engine.read_done(read.read, 1.0))
    two.giver.run(1.0)
    assert two.taker.is_clean and two.giver.is_clean


def test_two_jobs_that_name_one_loan_do_not_share_it() -> None:
    two = Two()
    effects = two.submit(borrower("b"))
    assert two.submit(borrower("c")) == []
    two.read(two.tell([*two.ask(effects), *two.digest()]))
    two.finish("b", 12)
    (end,) = two.taker.events("c", Finished)
    assert isinstance(end, Finished) and end.num_cached_tokens == 12
    # What is still said of it must not be taken for what a later job asks for under the same name.
    other = borrower("d")
    assert two.submit(replace(other, request=replace(other.request, cache_salt="other"))) == []


def test_what_is_lent_to_one_is_not_told_to_another_who_asks_for_something_else_under_the_same_name() -> None:
    """Two gateways that draw the same names, say: KV of another prompt must never have this one's name."""
    two = Two()
    lent = two.ask(two.submit(borrower("b")))
    lent += two.digest()
    third = Side()
    job = borrower("c")
    follow = follow_of(third.do(third.engine.submit(replace(job, request=request("c", PROMPT[2:])), 1.0)))
    (end,) = two.giver.do(two.giver.engine.follow(KEY, GIVER, 1.0, follow.borrow))
    assert isinstance(end, EndHandoff)
    (end,) = two.giver.do(two.giver.engine.follow(KEY, GIVER, 1.0))
    assert isinstance(end, EndHandoff), "nor to a Resume"
    two.read(two.tell(lent))
    two.finish("b", 12)


def test_choices_share_a_loan_and_each_may_be_cancelled() -> None:
    two = Two()
    effects = two.submit(borrower(num_choices=3))
    first, *_ = borrower(num_choices=3).keys
    assert two.taker.do(two.taker.engine.cancel(first, 1.0)) == [Emit(Cancelled(first))]
    told = two.read(two.tell([*two.ask(effects), *two.digest()]))
    (pulled,) = [x.event for x in told if isinstance(x, Emit)]
    assert isinstance(pulled, Pulled) and pulled.key.choice == 1
    two.ask(told)
    two.taker.run(1.0)
    assert len(two.taker.events("b", Finished)) == 2 and two.taker.is_clean and two.giver.is_clean


def test_a_loan_that_is_followed_twice_is_told_twice_and_lent_once() -> None:
    two = Two()
    effects = two.submit(borrower())
    told = [*two.ask(effects), *two.digest()]
    again = two.ask(effects)
    assert again == told and two.giver.engine.books().num_leases == 1
    reads = two.tell([*told, *again])
    two.read(reads)
    assert len([x for x in reads if isinstance(x, StartRead)]) == 1
    # It comes once more after the release: then it is over.
    two.ask([Unfollow(GIVER, KEY)])
    (end,) = two.ask(effects)
    assert isinstance(end, EndHandoff) and two.tell([end]) == []
    two.finish("b", 12)


def test_a_loan_that_nobody_renews_lapses() -> None:
    two = Two()
    two.ask(two.submit(borrower()))
    assert two.giver.engine.next_deadline() == 11.0
    effects = two.giver.do(two.giver.engine.tick(11.0))
    assert [type(x) for x in effects] == [EndHandoff]
    two.giver.run(11.0)
    assert two.giver.is_clean, "nothing is digested any more"


def test_a_loan_under_the_name_of_a_hand_off_is_not_lent_and_harms_it_not() -> None:
    two = Two()
    prefill = Prefill(request=request("p", (7, 7, 7)), attempt=1, handoff=KEY.handoff)
    two.giver.do(two.giver.engine.submit(prefill, 1.0))
    borrow = Borrow(0, tuple(two.giver.pool.names()))
    effects = two.giver.do(two.giver.engine.follow(HandoffKey(KEY.handoff, 2), TAKER, 1.0, borrow))
    assert effects == [] and two.giver.engine.books().num_leases == 1
    two.giver.run(1.0)
    assert two.giver.events("p", Finished)


def test_a_loan_is_renewed_like_any_pull() -> None:
    two = Two()
    told = [*two.ask(two.submit(borrower())), *two.digest()]
    two.now = 2.9
    reads = two.tell(told)
    assert two.taker.engine.tick(4.4) == [Renew(GIVER, (KEY,))]
    two.read(reads)
    two.finish("b", 12)


def test_a_taker_that_drains_gives_the_job_and_the_loan_back() -> None:
    two = Two()
    two.ask(two.submit(borrower()))
    effects = two.taker.do(two.taker.engine.evacuate(1.0))
    assert Unfollow(GIVER, KEY) in effects
    two.ask(effects)
    two.giver.run(1.0)
    assert two.taker.is_clean and two.giver.is_clean
