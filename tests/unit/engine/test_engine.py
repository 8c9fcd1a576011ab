"""Test one engine call by call: how it answers messages that arrive late, twice, early or from the wrong job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, FinishReason, JobEvent, SampledToken, Token
from tandem.core.ids import BlockId, HandoffId, HandoffKey, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.core.request_stages import JobStages
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendHandoffEnded,
    StartRead,
    TearDownPeer,
)
from tandem.engine.engine import Engine
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import Announcement, BlockDigest
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult

OTHER = WorkerRef(WorkerId("other"), Incarnation(1), "other:1")
KEY = HandoffKey(HandoffId("h"), 1)
REQUEST = Request(
    id=RequestId("r"),
    model="m",
    prompt_tokens=tuple(range(7)),
    sampling=SamplingParams(max_tokens=3, stop_token_ids=frozenset({99})),
)


def engine(pool: BlockPool | None = None, budget: int = 4) -> Engine:
    """An engine of steps of `budget` tokens at most, in blocks of two tokens unless a pool is given."""
    limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=4, max_model_len=64, digest_handoffs=False)
    return Engine(pool or BlockPool(12, 2), limits, HandoffConfig(), "model")


def request(name: str, prompt: range, max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(id=RequestId(name), model="m", prompt_tokens=tuple(prompt), sampling=sampling)


def generate(attempt: int = 1, choice: int = 0) -> GenerateJob:
    return GenerateJob(request=REQUEST, attempt=attempt, choice=choice)


def prefill(attempt: int = 1, request: Request = REQUEST) -> PrefillJob:
    return PrefillJob(request=request, attempt=attempt, handoff=HandoffId("h"))


def resume(attempt: int = 1, request: Request = REQUEST) -> ResumeJob:
    return ResumeJob(request=request, attempt=attempt, handoff=HandoffId("h"), source=OTHER)


def events(effects: list[Effect]) -> list[object]:
    return [x for x in effects if isinstance(x, JobEvent)]


def finish(
    e: Engine,
    plan: StepPlan | None,
    token: int,
    error: str | None = None,
    kind: ErrorKind = ErrorKind.INTERNAL,
    now: float = 1.0,
) -> list[Effect]:
    assert plan is not None
    results = [
        SliceResult(p.seq, () if error or not p.sampling else (SampledToken(token),), (), error, error_kind=kind)
        for p in plan.slices
    ]
    return e.finish(StepResult(plan.number, tuple(results)), now)


def step(e: Engine, token: int = 50, error: str | None = None, now: float = 1.0) -> list[Effect]:
    plan, effects = e.begin(now)
    effects = [*effects, *finish(e, plan, token, error, now=now)]
    e.check()
    return effects


def refusal(e: Engine, job: GenerateJob | PrefillJob | ResumeJob) -> ErrorKind | None:
    before = repr(e)
    try:
        e.submit(job, 1.0)
    except TandemError as error:
        assert repr(e) == before, "a refused job left something"
        e.check()
        return error.kind
    return None


def offer(first: int, stop: int, token: int | None = None) -> Announcement:
    blocks = tuple(BlockDigest(BlockId(i), ()) for i in range(first, stop))
    return Announcement(KEY, first, blocks, min(7, stop * 2), () if token is None else (SampledToken(token),), 3)


# ---- jobs


def test_a_job_runs_to_its_end() -> None:
    e = engine()
    assert e.submit(generate(), 0.0) == []
    received = [x for _ in range(4) for x in events(step(e))]
    key, stages = generate().key, JobStages(prefill_queue_s=1.0)
    assert received == [
        Token(key, 0, SampledToken(50), 0, stages),
        *(Token(key, i, SampledToken(50)) for i in (1, 2)),
        Finished(key, FinishReason.LENGTH, 3, 0),
    ]
    assert e.is_idle and e.num_live == 0


def test_the_same_job_again_changes_nothing() -> None:
    e = engine()
    e.submit(generate(), 0.0)
    assert e.submit(generate(), 0.0) == [] and e.num_live == 1
    assert events(e.cancel(generate().key, 0.0)) == [Cancelled(generate().key)]
    assert e.submit(generate(), 0.0) == [] and e.num_live == 0
    assert e.cancel(generate().key, 0.0) == []


def test_the_same_key_as_another_kind_of_job_is_refused() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    assert refusal(e, prefill()) is ErrorKind.INVALID_REQUEST


def test_a_newer_attempt_ends_the_older_one() -> None:
    e = engine()
    e.submit(generate(1), 0.0)
    step(e)
    assert events(e.submit(generate(2), 0.0)) == [Cancelled(generate(1).key)]
    assert e.live_jobs() == [generate(2).key]
    assert refusal(e, generate(1)) is None, "it ended here, so it is known and changes nothing"
    assert e.live_jobs() == [generate(2).key]


@pytest.mark.parametrize("end", ["live", "ended", "cancelled before it came"])
def test_a_late_older_attempt_is_rejected(end: str) -> None:
    e = engine()
    if end != "cancelled before it came":
        e.submit(generate(2), 0.0)
    if end != "live":
        e.cancel(generate(2).key, 0.0)
    assert refusal(e, generate(1)) is ErrorKind.CANCELLED


def test_a_refused_newer_attempt_leaves_the_older_one_alone() -> None:
    e = engine()
    e.submit(generate(1), 0.0)
    e.draining = True
    assert refusal(e, generate(2)) is ErrorKind.DRAINING
    assert e.submit(generate(1), 0.0) == [] and e.live_jobs() == [generate(1).key]


def test_choices_do_not_fence_each_other() -> None:
    e = engine()
    e.submit(generate(1, 0), 0.0)
    assert e.submit(generate(2, 1), 0.0) == [] and e.num_live == 2


# ---- the producer


def test_a_prefill_announces_each_chunk_and_keeps_its_lease() -> None:
    e = engine()
    assert e.follow(KEY, OTHER, 0.0) == []
    e.submit(prefill(), 0.0)
    (first,) = [x for x in step(e) if isinstance(x, SendAnnouncement)]
    assert first.consumer == OTHER and [b.block for b in first.message.blocks] == [0, 1]
    effects = step(e)
    (last,) = [x for x in effects if isinstance(x, SendAnnouncement)]
    assert last.message.first_index == 2 and last.message.first_tokens == (SampledToken(50),)
    first_token = Token(prefill().key, 0, SampledToken(50), 0, JobStages(prefill_queue_s=1.0))
    assert events(effects) == [first_token, Finished(prefill().key, None, 1, 0)]
    assert e.books().num_leased_blocks == 4 and not e.is_idle
    assert e.follow(KEY, OTHER, 1.0) == [first, last]
    assert e.release(KEY, 2.0) == [] and e.is_idle and e.books().num_free_blocks == 12


def test_a_release_ends_a_prefill_that_runs() -> None:
    e = engine()
    e.submit(prefill(), 0.0)
    step(e)
    assert events(e.release(KEY, 1.0)) == [Cancelled(prefill().key)]
    e.check()
    assert e.is_idle


@pytest.mark.parametrize("state", ["awaited", "open", "withdrawn"])
def test_only_its_last_follower_releases_a_lease(state: str) -> None:
    e, second = engine(), replace(OTHER, id=WorkerId("second"))
    if state != "awaited":
        e.submit(prefill(), 0.0)
        step(e)
    e.follow(KEY, OTHER, 1.0)
    e.follow(KEY, second, 1.0)
    if state == "withdrawn":
        e.revoke_lease(KEY, 1.0)
    before = repr(e)
    assert e.release(KEY, 2.0, consumer=OTHER) == [] and repr(e) == before
    if state == "awaited":
        e.submit(prefill(), 2.0)
    e.release(KEY, 2.0, consumer=second)
    e.check()
    assert e.is_idle


def test_a_lease_that_nobody_renews_costs_its_prefill() -> None:
    e = engine()
    e.follow(KEY, OTHER, 0.0)
    e.submit(prefill(), 0.0)
    step(e)
    assert e.renew([KEY], OTHER, 5.0) == [] and events(e.tick(14.9)) == []
    effects = e.tick(15.0)
    assert [x.kind for x in effects if isinstance(x, SendHandoffEnded)] == [ErrorKind.KV_LOST]
    assert [type(x) for x in events(effects)] == [Failed]
    (answer,) = e.renew([KEY], OTHER, 15.1)
    assert isinstance(answer, SendHandoffEnded) and answer.kind is ErrorKind.KV_LOST
    e.check()
    assert e.is_idle


@pytest.mark.parametrize(("token", "error", "kind"), [(99, None, ErrorKind.CANCELLED), (50, "x", ErrorKind.INTERNAL)])
def test_nothing_left_to_hand_over(token: int, error: str | None, kind: ErrorKind) -> None:
    """Check that followers learn the reason, at once and later."""
    e = engine()
    e.follow(KEY, OTHER, 0.0)
    e.submit(prefill(), 0.0)
    step(e)
    effects = step(e, token, error)
    (received,) = [x for x in effects if isinstance(x, SendHandoffEnded)]
    (again,) = e.follow(KEY, OTHER, 2.0)
    assert isinstance(again, SendHandoffEnded) and received.kind is again.kind is kind
    assert e.books().num_leased_blocks == 4 and not e.is_idle, "its consumer may be reading"
    assert e.release(KEY, 2.0) == [] and e.is_idle


@pytest.mark.parametrize("kind", [ErrorKind.INTERNAL, ErrorKind.INVALID_REQUEST])
def test_a_slice_error_names_its_cause(kind: ErrorKind) -> None:
    e = engine()
    e.follow(KEY, OTHER, 0.0)
    e.submit(prefill(), 0.0)
    step(e)
    plan, effects = e.begin(1.0)
    effects = [*effects, *finish(e, plan, 50, "x", kind)]
    assert [x.kind for x in effects if isinstance(x, SendHandoffEnded)] == [kind]
    assert [x.kind for x in events(effects) if isinstance(x, Failed)] == [kind]
    e.check()
    assert e.release(KEY, 2.0) == [] and e.is_idle


@pytest.mark.parametrize("how", ["cancel", "recall", "cancel and recall", "recall when it is done"])
@pytest.mark.parametrize("is_released", [True, False])
def test_blocks_that_may_be_read_are_not_reused(how: str, is_released: bool) -> None:
    """Check blocks without hashes, such as a partial last block, which are the first to be reused.

    Until the consumer knows that the hand-off or its lease is over, it takes the content of these blocks for what was
    announced.
    """
    e = engine()
    e.follow(KEY, OTHER, 0.0)
    e.submit(prefill(), 0.0)
    step(e)
    if how == "recall when it is done":
        step(e)
    effects = e.cancel(prefill().key, 1.0) if "cancel" in how else []
    effects += e.revoke_lease(KEY, 1.0) if "recall" in how else []
    assert [(x.consumer, x.key) for x in effects if isinstance(x, SendHandoffEnded)] == [(OTHER, KEY)]
    assert e.live_jobs() == [] and e.books().num_leased_blocks == 4
    e.submit(GenerateJob(request=request("other", range(20, 32), 3), attempt=1), 1.0)
    used: set[BlockId] = set()
    while (plan := e.begin(2.0)[0]) is not None:
        used.update(block for piece in plan.slices for block in piece.blocks)
        finish(e, plan, 50, now=2.0)
        e.check()
    assert len(used) == 7 and used.isdisjoint(range(4))
    (again,) = e.renew([KEY], OTHER, 5.0)
    assert isinstance(again, SendHandoffEnded)
    assert (e.release(KEY, 9.0) if is_released else e.tick(10.0)) == []
    e.check()
    assert e.is_idle and e.books().num_free_blocks == 12


def test_what_is_recalled_before_anybody_may_read_it_is_free_at_once() -> None:
    e = engine()
    e.submit(prefill(), 0.0)
    step(e)
    assert events(e.revoke_lease(KEY, 1.0)) == [Cancelled(prefill().key)]
    e.check()
    assert e.is_idle and e.revoke_lease(KEY, 1.0) == []
    assert refusal(e, prefill(2, replace(REQUEST, id=RequestId("third")))) is None


def test_a_newer_attempt_takes_the_lease_over() -> None:
    e = engine()
    e.follow(KEY, OTHER, 0.0)
    e.submit(prefill(1), 0.0)
    step(e)
    effects = e.submit(prefill(2), 0.0)
    assert [x.key for x in effects if isinstance(x, SendHandoffEnded)] == [KEY]
    assert events(effects) == [Cancelled(prefill(1).key)]
    e.check()
    assert e.release(KEY, 1.0) == [] and e.live_jobs() == [prefill(2).key]


def test_a_lease_that_another_request_takes_over_ends_the_job_that_had_it() -> None:
    e = engine()
    stranger = replace(REQUEST, id=RequestId("stranger"))
    e.submit(prefill(1), 0.0)
    step(e)
    assert events(e.submit(prefill(2, stranger), 0.0)) == [Cancelled(prefill(1).key)]
    assert e.live_jobs() == [prefill(2, stranger).key]
    step(e)
    assert refusal(e, prefill(1, replace(REQUEST, id=RequestId("third")))) is ErrorKind.CANCELLED


# ---- the consumer


def test_the_first_token_does_not_wait_for_the_kv() -> None:
    e = engine()
    assert e.submit(resume(), 0.0) == [FollowHandoff(OTHER, KEY)]
    assert e.begin(0.0) == (None, [])
    assert e.announced(offer(0, 2), 1.0) == []
    e.renewed((KEY,), 0.0, 10.0)
    _, (read,) = e.begin(1.0)
    assert isinstance(read, StartRead) and e.books().num_reading_blocks == 2
    token, second = e.announced(offer(2, 4, 50), 2.0)
    assert events([token]) == [Token(resume().key, 0, SampledToken(50), 3)] and isinstance(second, StartRead)
    assert events(e.announced(offer(0, 4, 50), 2.0)) == [], "a replay"
    assert e.read_done(read.read, 3.0) == []
    unfollow, pulled = e.read_done(second.read, 3.0)
    assert unfollow == ReleaseHandoff(OTHER, KEY, is_taken=True) and isinstance(pulled, JobEvent)
    e.check()
    received = [x for _ in range(2) for x in events(step(e, now=4.0))]
    # One second of the pull came after its source's last word, one the arrived KV waited for a step.
    stages = JobStages(transfer_s=1.0, decode_queue_s=1.0)
    assert received[:2] == [Token(resume().key, i, SampledToken(50), stages=x) for i, x in ((1, stages), (2, None))]
    assert e.is_idle
    assert received[2:] == [Finished(resume().key, FinishReason.LENGTH, 3, 3)], "of the source's cache, not its own"


def test_a_cancelled_pull_holds_its_blocks_until_its_read_has_ended() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    e.announced(offer(0, 4, 50), 1.0)
    _, (read,) = e.begin(1.0)
    assert isinstance(read, StartRead)
    effects = e.cancel(resume().key, 2.0)
    assert ReleaseHandoff(OTHER, KEY) in effects and events(effects) == [Cancelled(resume().key)]
    books = e.books()
    assert (books.num_free_blocks, books.num_reading_blocks, books.num_table_blocks) == (8, 4, 0)
    assert e.tick(12.0) == [TearDownPeer(OTHER, "a read does not end")]
    assert e.peer_lost(OTHER, "gone", proven=False, now=13.0) == []
    assert e.books().num_quarantined_blocks == 4 and not e.is_idle
    assert e.peer_lost(OTHER, "gone", proven=True, now=14.0) == []
    e.check()
    assert e.is_idle and e.books().num_free_blocks == 12


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        (ErrorKind.KV_LOST, Failed(JobKey(RequestId("r"), 1), ErrorKind.KV_LOST, "why")),
        (ErrorKind.CANCELLED, Finished(JobKey(RequestId("r"), 1), None, 0, 0)),
    ],
)
def test_a_handoff_that_the_source_ends(kind: ErrorKind, event: object) -> None:
    """If nothing is left to take, the source's own event ends the request, and the consumer's must not be a failure."""
    e = engine()
    e.submit(resume(), 0.0)
    assert events(e.handoff_ended(KEY, kind, "why", 1.0)) == [event]
    assert e.handoff_ended(KEY, kind, "why", 1.0) == [] and e.is_idle


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_read_waits_for_what_its_blocks_are_copied_out(is_cancelled: bool) -> None:
    """Fill the pool with another prompt's blocks, which host memory is to keep: no read may write into them before the
    end of the step that copies them out, although that step computes nothing."""
    e = engine(BlockPool(5, 2, num_host_slots=5), 16)
    e.submit(GenerateJob(request=request("o", range(20, 30), 0), attempt=1), 0.0)
    step(e)
    e.submit(resume(), 0.0)
    e.announced(offer(0, 4, 50), 1.0)
    plan, effects = e.begin(1.0)
    assert plan is not None and not plan.slices and len(plan.spills) == 5 and effects == []
    e.check()
    if is_cancelled:
        e.cancel(resume().key, 1.0)
        assert e.books().num_free_blocks == 0, "they are being copied"
    effects = finish(e, plan, 0)
    e.check()
    assert e.books().num_host_blocks == 5
    assert e.begin(1.0) == (None, [])
    if is_cancelled:
        assert effects == [] and e.books().num_free_blocks == 5
    else:
        assert [type(effect) for effect in effects] == [StartRead]
    e.check()


def test_one_handoff_feeds_one_job() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    assert refusal(e, resume(request=replace(REQUEST, id=RequestId("other")))) is ErrorKind.INVALID_REQUEST
    assert events(e.submit(resume(2), 0.0)) == [Cancelled(resume(1).key)]
    e.check()


def test_words_about_what_is_not_here_change_nothing() -> None:
    e = engine()
    assert e.announced(offer(0, 4, 50), 0.0) == []
    assert e.handoff_ended(KEY, ErrorKind.KV_LOST, "", 0.0) == []
    assert e.read_done(7, 0.0) == e.read_failed(7, "", drained=False, now=0.0) == []
    assert e.source_lost(OTHER, "", 0.0) == e.peer_lost(OTHER, "", proven=True, now=0.0) == []
    assert e.release(KEY, 0.0) == [] and refusal(e, prefill()) is ErrorKind.CANCELLED
    e.renewed((KEY,), 0.0, 10.0)
    assert e.is_idle


def test_live_pulls_are_renewed_together_every_third_of_a_lease() -> None:
    e = engine()
    e.submit(resume(), 0.0)
    assert e.tick(0.0) == e.tick(3.0) == [], "following asks for the first third"
    assert e.tick(3.4) == [RenewLeases(OTHER, (KEY,))] and e.tick(6.6) == []
    assert e.tick(6.8) == [RenewLeases(OTHER, (KEY,))]


def test_a_load_counts_what_steps_were_made_of_and_that_is_no_news() -> None:
    """Compute a prompt of 7 tokens in steps of 4 and 3, then one decoded token; loads compare equal whatever these
    counts are."""
    e = engine()
    e.submit(generate(), 0.0)
    for _ in range(3):
        step(e)
    load = e.load()
    assert (load.num_prefill_tokens, load.num_decode_tokens) == (7, 1)
    assert replace(load, num_prefill_tokens=0, num_decode_tokens=0) == load
