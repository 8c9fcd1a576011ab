"""Test the state machine of a request: the commands on common and rare paths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    KVReceived,
    MigrationOffered,
    PromptLogprobs,
    SampledToken,
    Token,
)
from tandem.core.ids import HandoffId, HandoffKey, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.orchestration.commands import (
    CancelJob,
    EndRequest,
    FindConsumer,
    ReleaseLease,
    ReportWorkerFailure,
    Requeue,
    StateCommand,
    SubmitJob,
)
from tandem.orchestration.job_group import JobGroupPhase, JobGroupStep
from tandem.orchestration.request_state import RequestState
from tandem.routing.cost import RemotePrefixPlan
from tandem.routing.placement import Placement

P = WorkerRef(WorkerId("p"), Incarnation(1), "p:1")
D = WorkerRef(WorkerId("d"), Incarnation(1), "d:1")
OTHER = WorkerRef(WorkerId("other"), Incarnation(1), "other:1")
REQUEST = Request(id=RequestId("r"), model="m", prompt_tokens=(1, 2), sampling=SamplingParams(max_tokens=3))
PULLED = KVReceived(JobKey(RequestId("r"), 1), 1, 1, 0, 1, 0.1, 0.1, 0.1)


def key(attempt: int = 1) -> JobKey:
    return JobKey(RequestId("r"), attempt)


def token(index: int, attempt: int = 1) -> Token:
    return Token(key(attempt), index, SampledToken(100 + index))


def booked(request: Request = REQUEST, max_retries: int = 4) -> RequestState:
    """Return a request for which D has been asked to reserve room."""
    life = RequestState(request, HandoffId("h"), max_retries)
    life.placed(Placement(P, D))
    return life


def starting(request: Request = REQUEST, max_retries: int = 4) -> RequestState:
    """Return a request for which D has reserved room, and P has been asked to compute the prompt."""
    life = booked(request, max_retries)
    life.accepted(D, key())
    return life


def run_again(life: RequestState, attempt: int) -> None:
    """Place a queued request on both workers, which accept it."""
    life.placed(Placement(P, D))
    life.accepted(D, key(attempt))
    life.accepted(P, key(attempt))


def remote() -> RequestState:
    """Return a request that runs on both workers."""
    life = RequestState(REQUEST, HandoffId("h"))
    (book,) = life.placed(Placement(P, D))
    assert isinstance(book, SubmitJob) and isinstance(book.job, ResumeJob) and book.worker == D
    (start,) = life.accepted(D, key())
    assert isinstance(start, SubmitJob) and isinstance(start.job, PrefillJob) and start.worker == P
    assert life.accepted(P, key()) == []
    return life


def shape(commands: list[StateCommand]) -> list[str]:
    names = []
    for command in commands:
        match command:
            case CancelJob():
                names.append(f"cancel {command.worker.id}")
            case ReleaseLease():
                names.append(f"release {command.worker.id}")
            case Token():
                names.append(f"token {command.index}")
            case SubmitJob():
                names.append(f"submit {command.worker.id}")
            case Requeue():
                names.append("place without " + ",".join(sorted(w.id for w in command.excluded)))
            case EndRequest():
                out = command.outcome
                names.append(f"end {out.kind.value}" if isinstance(out, TandemError) else f"end {out.reason}")
    return names


def test_remote_request_delivers_each_token_once_and_ends_once() -> None:
    life = remote()
    assert shape(life.reported(P, token(0))) == ["token 0"]
    assert life.reported(P, Finished(key(), None, 1, 1)) == []
    assert life.reported(D, token(0)) == []
    assert life.reported(D, PULLED) == []
    assert shape(life.reported(D, token(1))) == ["token 1"]
    assert shape(life.reported(D, token(2))) == ["token 2"]
    (end,) = life.reported(D, Finished(key(), FinishReason.LENGTH, 3, 1))
    assert end == EndRequest(RequestId("r"), Finished(key(), FinishReason.LENGTH, 3, 1))
    assert life.phase is JobGroupPhase.ENDED and life.workers() == ()


def test_tokens_ahead_of_the_next_index_wait() -> None:
    life = remote()
    assert life.reported(D, token(1)) == []
    assert shape(life.reported(P, token(0))) == ["token 0", "token 1"]


def test_consecutive_tokens_count_at_once_when_next() -> None:
    life = remote()
    assert not life.streamed(D, key(), 1, (101, 102)), "the first one is missing"
    assert shape(life.reported(P, token(0))) == shape([token(0)])
    assert not life.streamed(D, key(2), 1, (101, 102)) and not life.streamed(OTHER, key(), 1, (101, 102))
    assert life.streamed(D, key(), 1, (101, 102)) and life.num_delivered == 3
    assert not life.streamed(D, key(), 1, (101, 102)), "once is enough"
    assert life.streamed(D, key(), 3, (103,)) and life.num_delivered == 4


def test_a_finish_waits_for_the_tokens_it_counts() -> None:
    life = remote()
    assert life.reported(D, Finished(key(), FinishReason.LENGTH, 2, 0)) == []
    life.reported(P, token(0))
    assert shape(life.reported(P, token(1)))[0] == "token 1"
    assert life.phase is JobGroupPhase.ENDED


def test_first_token_that_ends_the_request_cancels_the_resume_and_releases() -> None:
    life = remote()
    life.reported(P, token(0))
    assert shape(life.reported(P, Finished(key(), FinishReason.STOP, 1, 0))) == [
        "cancel d", "release p", "end FinishReason.STOP",
    ]  # fmt: skip


def test_decode_without_capacity_requeues_and_touches_no_prefill_worker() -> None:
    life = booked()
    commands = life.refused(D, key(), TandemError(ErrorKind.OVERLOADED, "full"))
    assert shape(commands) == ["place without d"] and life.phase is JobGroupPhase.QUEUED
    (again,) = life.placed(Placement(P, D))
    assert isinstance(again, SubmitJob) and again.job.attempt == 2


def test_prefill_without_capacity_undoes_the_reservation() -> None:
    life = starting()
    commands = life.refused(P, key(), TandemError(ErrorKind.DRAINING, "bye"))
    assert shape(commands) == ["cancel d", "place without p"]
    assert life.reported(D, Failed(key(), ErrorKind.KV_LOST, "late")) == [], "the old attempt has nothing to say"
    assert life.phase is JobGroupPhase.QUEUED


def test_a_pull_without_capacity_is_placed_again_and_repeats_no_token() -> None:
    life = remote()
    life.reported(P, token(0))
    life.reported(P, Finished(key(), None, 1, 0))
    commands = shape(life.reported(D, Failed(key(), ErrorKind.OVERLOADED, "no room for the KV")))
    assert commands == ["release p", "place without d"] and life.phase is JobGroupPhase.QUEUED
    run_again(life, 2)
    assert life.reported(P, token(0, 2)) == [], "the client has it"
    assert shape(life.reported(D, token(1, 2))) == ["token 1"]


def test_blocks_cached_by_an_earlier_attempt_are_no_hit_of_the_request() -> None:
    """The prefill worker has reported the cached tokens, whatever happens to its attempt."""
    life = remote()
    life.reported(P, replace(token(0), num_cached_tokens=1))
    life.reported(D, Failed(key(), ErrorKind.OVERLOADED, "no room for the KV"))
    run_again(life, 2)
    life.reported(D, KVReceived(key(2), 1, 1, 0, 1, 0.1, 0.1, 0.1))
    life.reported(D, replace(token(0, 2), num_cached_tokens=2))
    commands = [command for i in range(1, 3) for command in life.reported(D, token(i, 2))]
    commands += life.reported(D, Finished(key(2), FinishReason.LENGTH, 3, 2))
    assert commands[-1] == EndRequest(RequestId("r"), Finished(key(2), FinishReason.LENGTH, 3, 1))
    assert life.reported(P, Finished(key(2), None, 1, 2)) == []


def test_a_permanent_refusal_ends_the_request() -> None:
    life = RequestState(REQUEST, HandoffId("h"))
    life.placed(Placement(D, D))
    assert shape(life.refused(D, key(), TandemError(ErrorKind.CONTEXT_LENGTH, "long"))) == [
        "end context_length_exceeded"
    ]


def test_a_lost_prefill_worker_costs_the_attempt_and_no_token() -> None:
    life = remote()
    life.reported(P, token(0))
    assert shape(life.worker_lost(P, "killed")) == ["cancel d", "release p", "place without p"]
    assert life.worker_lost(P, "again") == [] and life.phase is JobGroupPhase.QUEUED
    (book,) = life.placed(Placement(OTHER, D))
    assert isinstance(book, SubmitJob) and book.job.output_tokens == (100,)
    (start,) = life.accepted(D, key(2))
    assert isinstance(start, SubmitJob) and isinstance(start.job, PrefillJob) and start.job.output_tokens == (100,)
    life.accepted(OTHER, key(2))
    assert shape(life.reported(OTHER, token(1, 2))) == ["token 1"] and life.path == "remote;retries=1"


def test_a_lost_decode_worker_whose_kv_is_still_offered_is_replaced_alone() -> None:
    """The new worker pulls what the first attempt computed, so its job begins there: before the first token."""
    life = remote()
    life.reported(P, token(0))
    life.reported(P, Finished(key(), None, 1, 0))
    assert life.worker_lost(D, "killed") == [FindConsumer(0, P, frozenset({D}), frozenset({D}))]
    assert life.seeks() == [FindConsumer(0, P, frozenset(), frozenset({D}))]
    (book,) = life.consumer_found(0, OTHER)
    job = book.job if isinstance(book, SubmitJob) else None
    assert isinstance(job, ResumeJob) and (job.attempt, job.offer_attempt, job.source) == (2, 1, P)
    assert job.output_tokens == () and job.offer == HandoffKey(HandoffId("h/0"), 1)
    assert life.accepted(OTHER, key(2)) == [] and life.phase is JobGroupPhase.RUNNING
    assert life.reported(OTHER, token(0, 2)) == [], "the client has it"
    assert shape(life.reported(OTHER, token(1, 2))) == ["token 1"]


def test_kv_without_a_consumer_is_recomputed() -> None:
    life = remote()
    life.worker_lost(D, "killed")
    assert shape(life.consumer_found(0, None)) == ["cancel p", "release p", "place without "]
    assert life.phase is JobGroupPhase.QUEUED
    assert life.consumer_found(0, OTHER) == [], "too late"
    life = remote()
    life.worker_lost(D, "killed")
    assert shape(life.worker_lost(P, "killed too")) == ["release p", "place without p"]
    life = remote()
    life.worker_lost(D, "killed")
    life.consumer_found(0, OTHER)
    gone = life.reported(OTHER, Failed(key(2), ErrorKind.KV_LOST, "the lease ran out"))
    assert gone[0] == ReportWorkerFailure(frozenset({P, OTHER}))
    assert shape(gone) == ["cancel p", "release p", "place without other"]


def test_a_lost_decode_worker_that_had_pulled_loses_its_kv() -> None:
    life = remote()
    life.reported(P, token(0))
    life.reported(D, PULLED)
    life.reported(D, token(1))
    assert shape(life.worker_lost(D, "killed")) == ["cancel p", "place without d"]
    (book,) = life.placed(Placement(OTHER, OTHER))
    assert isinstance(book, SubmitJob) and isinstance(book.job, GenerateJob) and book.job.output_tokens == (100, 101)


def test_failed_attempts_are_counted_until_there_is_progress() -> None:
    life = RequestState(REQUEST, HandoffId("h"), max_retries=1)

    def attempt(number: int) -> None:
        life.placed(Placement(D, D))
        life.accepted(D, key(number))

    attempt(1)
    assert shape(life.worker_lost(D, "killed")) == ["place without d"]
    attempt(2)
    life.reported(D, token(0, 2))
    assert shape(life.reported(D, Failed(key(2), ErrorKind.INTERNAL, "a step failed"))) == ["place without d"]
    attempt(3)
    assert life.reported(D, token(0, 3)) == [], "the client has it, which is no progress"
    (*_, end) = life.reported(D, Failed(key(3), ErrorKind.INTERNAL, "a step failed"))
    assert shape([end]) == ["end internal"] and isinstance(end, EndRequest)
    assert isinstance(end.outcome, TandemError) and "2 attempts in a row" in end.outcome.message


LONG = replace(REQUEST, sampling=SamplingParams(max_tokens=10))


def lose_kv(life: RequestState, number: int) -> list[StateCommand]:
    """Run an attempt on both workers that delivers the token of its prefill, and no KV."""
    run_again(life, number)
    assert shape(life.reported(P, token(number - 1, number))) == [f"token {number - 1}"]
    return life.reported(D, Failed(key(number), ErrorKind.KV_LOST, "no KV arrived"))


def test_tokens_of_prefills_alone_are_no_progress() -> None:
    """Otherwise a request would be computed once for each of its tokens, over a link that transfers no KV."""
    life = RequestState(LONG, HandoffId("h"), max_retries=2)
    lose_kv(life, 1)
    lose_kv(life, 2)
    (*_, end) = lose_kv(life, 3)
    assert shape([end]) == ["end kv_lost"]


def test_one_token_of_the_decode_worker_is_progress() -> None:
    life = RequestState(LONG, HandoffId("h"), max_retries=2)
    lose_kv(life, 1)
    lose_kv(life, 2)
    run_again(life, 3)
    assert life.streamed(P, key(3), 2, (102,)) and life.streamed(D, key(3), 3, (103,))
    (*_, place) = life.reported(D, Failed(key(3), ErrorKind.KV_LOST, "no KV arrived"))
    assert place == Requeue(frozenset({D}), has_failed=True)


def test_kv_lost_twice_is_not_handed_over_again() -> None:
    life = RequestState(LONG, HandoffId("h"))
    assert lose_kv(life, 1)[-1] == Requeue(frozenset({D}), has_failed=True)
    assert lose_kv(life, 2)[-1] == Requeue(frozenset({D}), has_failed=True, is_undivided=True)


def test_requests_requeued_by_draining_workers_are_no_failure() -> None:
    """Any number of workers may drain, one after the other."""
    life = RequestState(REQUEST, HandoffId("h"), max_retries=0)
    for number in range(1, 4):
        run_again(life, number)
        worker = (P, D)[number % 2]
        commands = life.reported(worker, Failed(key(number), ErrorKind.DRAINING, "about to stop"))
        assert shape(commands)[-1] == f"place without {worker.id}" and commands[-1] == Requeue(frozenset({worker}))
    assert life.num_retries == 0, "nothing had come of it that went on elsewhere"


def test_a_reservation_given_up_before_the_prefill_costs_only_the_placement() -> None:
    """The decode worker's notice may reach the prefill worker before the gateway's SubmitJob."""
    life = starting(max_retries=0)
    commands = life.refused(P, key(), TandemError(ErrorKind.CANCELLED, "hand-off h/0#1 has ended"))
    assert shape(commands) == ["cancel d", "place without p"]
    assert life.reported(D, Failed(key(), ErrorKind.DRAINING, "about to stop")) == []
    assert life.phase is JobGroupPhase.QUEUED
    (again,) = life.placed(Placement(P, D))
    assert isinstance(again, SubmitJob) and again.job.attempt == 2


def test_no_token_is_sampled_after_the_last() -> None:
    """The worker is lost between the last token and the end."""
    life = RequestState(REQUEST, HandoffId("h"))
    life.placed(Placement(D, D))
    for i in range(3):
        life.reported(D, token(i))
    (end,) = life.worker_lost(D, "killed")
    assert shape([end]) == ["end FinishReason.LENGTH"]


def test_workers_without_progress_are_treated_as_lost() -> None:
    life = remote()
    blame, *rest = life.stalled("no progress within 1 s")
    assert blame == ReportWorkerFailure(frozenset({P, D}))
    assert shape(rest) == ["cancel d", "cancel p", "release p", "place without d,p"]
    assert life.stalled("nobody works on it") == []


def test_a_prefill_worker_that_handed_over_is_not_missed() -> None:
    life = remote()
    life.reported(P, token(0))
    life.reported(P, Finished(key(), None, 1, 0))
    assert life.worker_lost(P, "killed") == [] and life.phase is JobGroupPhase.RUNNING


def test_cancel_before_anything_was_placed() -> None:
    life = RequestState(REQUEST, HandoffId("h"))
    assert shape(life.cancelled()) == ["end cancelled"]
    assert life.cancelled() == [], "there is one end"


def test_cancel_of_a_running_request_reaches_both_sides() -> None:
    life = remote()
    assert shape(life.cancelled()) == ["cancel d", "cancel p", "release p", "end cancelled"]
    assert life.reported(D, token(0)) == [] and life.accepted(P, key()) == []


def test_an_unrequested_cancellation_is_a_loss() -> None:
    life = remote()
    assert shape(life.reported(D, Cancelled(key()))) == ["cancel p", "release p", "place without d"]


def test_local_request() -> None:
    life = RequestState(REQUEST, HandoffId("h"))
    (submit,) = life.placed(Placement(D, D))
    assert isinstance(submit, SubmitJob) and isinstance(submit.job, GenerateJob)
    assert life.accepted(D, key()) == [] and life.phase is JobGroupPhase.RUNNING
    for i in range(3):
        assert shape(life.reported(D, token(i))) == [f"token {i}"]
    assert life.reported(D, Finished(key(), FinishReason.LENGTH, 3, 1)) == [
        EndRequest(RequestId("r"), Finished(key(), FinishReason.LENGTH, 3, 1))
    ]


def test_steps_not_in_the_table_are_refused() -> None:
    life = remote()
    with pytest.raises(RuntimeError, match="cannot take PLACED"):
        life.placed(Placement(P, D))
    assert life.phase is JobGroupPhase.RUNNING
    assert not any(JobGroupPhase.ENDED in step.value[0] for step in JobGroupStep), "nothing follows the end"
    assert JobGroupStep.END.value[0] | {JobGroupPhase.ENDED} == set(JobGroupPhase), "every phase may end"


def test_a_worker_lost_before_both_accept_costs_only_the_placement() -> None:
    life = booked()
    assert shape(life.worker_lost(D, "killed")) == ["place without d"] and life.phase is JobGroupPhase.QUEUED
    life = starting()
    assert shape(life.worker_lost(P, "killed")) == ["cancel d", "release p", "place without p"]
    assert life.phase is JobGroupPhase.QUEUED and life.workers() == ()


def test_a_job_is_cancelled_at_a_worker_that_does_not_reply() -> None:
    life = starting()
    silent = TandemError(ErrorKind.WORKER_LOST, "no answer")
    assert shape(life.refused(P, key(), silent)) == ["cancel d", "cancel p", "release p", "place without p"]


def test_a_prefill_worker_is_not_missed_once_its_kv_has_arrived() -> None:
    life = remote()
    life.reported(P, token(0))
    life.reported(D, PULLED)
    assert life.worker_lost(P, "killed") == [] and life.phase is JobGroupPhase.RUNNING


def test_events_of_an_earlier_attempt_are_ignored() -> None:
    life = starting()
    assert shape(life.reported(P, token(0))) == ["token 0"]
    life.reported(D, Finished(key(), FinishReason.LENGTH, 3, 0))
    life.worker_lost(P, "killed")
    life.placed(Placement(D, D))
    assert life.reported(D, token(0, 2)) == [], "the client has it"
    assert shape(life.reported(D, token(1, 2))) == ["token 1"] and life.phase is JobGroupPhase.RESERVING


SCORED = replace(REQUEST, prompt_tokens=(1, 2, 3, 4), prompt_logprobs=0)


def scores(first: int, count: int) -> PromptLogprobs:
    return PromptLogprobs(key(), first, tuple(SampledToken(i, -float(i)) for i in range(first, first + count)))


def scored() -> RequestState:
    """Return a request whose prompt has three scores, on both workers."""
    life = starting(SCORED)
    life.accepted(P, key())
    return life


def test_scores_are_delivered_once_and_before_all_tokens() -> None:
    """The decode worker's stream may be ahead of the prefill worker's, which alone has the scores."""
    life = scored()
    assert life.reported(P, scores(1, 2)) == [scores(1, 2)]
    assert life.reported(P, scores(1, 1)) == [], "a stream that was opened again tells from the start"
    assert life.reported(D, token(0)) == life.reported(D, token(1)) == []
    assert not life.streamed(D, key(), 2, (102,))
    assert life.reported(D, token(2)) == life.reported(D, Finished(key(), FinishReason.LENGTH, 3, 0)) == []
    commands = life.reported(P, scores(2, 2))
    assert commands[0] == scores(3, 1) and shape(commands[1:4]) == ["token 0", "token 1", "token 2"]
    assert shape(commands[4:]) == ["cancel p", "release p", "end FinishReason.LENGTH"]


def test_a_prefill_worker_that_is_lost_with_scores_is_missed() -> None:
    life = scored()
    life.reported(P, scores(1, 2))
    life.reported(D, PULLED)
    assert shape(life.worker_lost(P, "killed")) == ["cancel d", "place without p"]
    life = scored()
    life.reported(P, scores(1, 3))
    life.reported(D, PULLED)
    assert life.worker_lost(P, "killed") == []


def test_a_gap_in_the_scores_ends_the_request() -> None:
    life = scored()
    assert shape(life.reported(P, scores(2, 1))) == ["cancel d", "cancel p", "release p", "end internal"]


def test_a_prompt_alone_ends_with_the_prefill() -> None:
    life = scored()
    life.reported(P, scores(1, 3))
    assert life.reported(D, Finished(key(), None, 0, 0)) == []
    (end, *rest) = reversed(life.reported(P, Finished(key(), FinishReason.LENGTH, 0, 2)))
    assert end == EndRequest(RequestId("r"), Finished(key(), FinishReason.LENGTH, 0, 2))
    assert shape(rest) == ["release p"]


# ---- several choices


def several(num_choices: int = 3, is_remote: bool = True) -> RequestState:
    """Return a running request of several choices, on both workers or on D alone."""
    life = RequestState(replace(REQUEST, num_choices=num_choices), HandoffId("h"))
    (book,) = life.placed(Placement(P if is_remote else D, D))
    assert isinstance(book, SubmitJob) and book.job.keys == tuple(choice_key(i) for i in range(num_choices))
    commands = life.accepted(D, key())
    if is_remote:
        (start,) = commands
        assert (
            isinstance(start, SubmitJob) and isinstance(start.job, PrefillJob) and start.job.num_choices == num_choices
        )
        life.accepted(P, key())
    return life


def choice_key(choice: int, attempt: int = 1) -> JobKey:
    return JobKey(RequestId("r"), attempt, choice)


def sampled(choice: int, index: int, attempt: int = 1) -> Token:
    return Token(choice_key(choice, attempt), index, SampledToken(100 * choice + index))


def test_each_choice_has_its_tokens_in_order_and_one_end_and_the_last_is_the_requests() -> None:
    life = several(2, is_remote=False)
    assert life.reported(D, sampled(1, 1)) == []
    assert life.reported(D, sampled(0, 0)) == [sampled(0, 0)]
    assert life.reported(D, sampled(1, 0)) == [sampled(1, 0), sampled(1, 1)]
    end = Finished(choice_key(1), FinishReason.STOP, 2, 2)
    assert life.reported(D, end) == [end] and life.phase is JobGroupPhase.RUNNING
    assert life.positions(D) == [(choice_key(0), 1)] and life.num_delivered == 3
    assert life.reported(D, sampled(1, 2)) == [], "it has ended"
    last = Finished(choice_key(0), FinishReason.LENGTH, 1, 2)
    assert life.reported(D, last) == [EndRequest(RequestId("r"), last)] and life.phase is JobGroupPhase.ENDED


def test_a_choice_ended_by_its_first_token_is_cancelled_at_the_decode_worker() -> None:
    life = several()
    for choice in range(3):
        life.reported(P, sampled(choice, 0))
    assert life.reported(P, Finished(choice_key(0), None, 1, 2)) == []
    end = Finished(choice_key(1), FinishReason.STOP, 1, 2)
    assert life.reported(P, end) == [CancelJob(D, (choice_key(1),)), end]
    assert life.positions(D) == [(choice_key(0), 1), (choice_key(2), 1)] and life.positions(P) == [(choice_key(2), 1)]
    assert life.reported(D, Cancelled(choice_key(1))) == [], "the cancellation was requested"


def test_a_client_may_end_one_choice_and_keep_the_others() -> None:
    life = several()
    assert life.finished(0) == [CancelJob(D, (choice_key(0),)), CancelJob(P, (choice_key(0),))]
    assert life.finished(0) == [] and life.reported(D, sampled(0, 0)) == []
    assert life.reported(P, sampled(2, 0)) == [sampled(2, 0)]
    life.finished(1)
    commands = life.finished(2)
    assert shape(commands) == ["cancel d", "cancel p", "release p", "end cancelled"]
    assert commands[0] == CancelJob(D, (choice_key(2),)), "the others are cancelled already"


def test_choices_that_have_ended_are_not_placed_again() -> None:
    life = several()
    life.reported(P, sampled(0, 0))
    life.reported(P, Finished(choice_key(0), FinishReason.STOP, 1, 0))
    life.finished(1)
    commands = life.reported(D, Failed(choice_key(2), ErrorKind.OVERLOADED, "no room for the KV"))
    assert shape(commands)[-1] == "place without d"
    (book,) = life.placed(Placement(P, D))
    assert isinstance(book, SubmitJob) and book.job.keys == (choice_key(2, 2),) and life.key == choice_key(2, 2)


def test_a_choice_that_ended_between_others_is_cancelled_with_the_next_attempt() -> None:
    life = several()
    life.finished(1)
    life.reported(D, Failed(choice_key(0), ErrorKind.OVERLOADED, "no room for the KV"))
    submit, cancel = life.placed(Placement(D, D))
    assert isinstance(submit, SubmitJob) and submit.job.num_choices == 3
    assert cancel == CancelJob(D, (choice_key(1, 2),))
    assert life.accepted(D, choice_key(0, 2)) == []
    assert life.positions(D) == [(choice_key(0, 2), 0), (choice_key(2, 2), 0)]


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_scores_reported_under_an_ended_choice_belong_to_the_others(closed: int) -> None:
    """The client ends the choice under whose key the worker is about to report the scores."""
    life = starting(replace(REQUEST, num_choices=3, prompt_logprobs=0))
    life.accepted(P, key())
    for choice in range(3):
        assert life.reported(P, sampled(choice, 0)) == []
    assert shape(life.finished(closed)) == ["cancel d", "cancel p"]
    late = replace(scores(1, 1), key=choice_key(closed))
    assert life.reported(OTHER, late) == [] and life.reported(P, replace(late, key=choice_key(closed, 7))) == []
    commands = life.reported(P, late)
    assert commands[0] == late
    assert [command for command in commands if isinstance(command, Token)] == [
        sampled(choice, 0) for choice in range(3) if choice != closed
    ]


# ---- migration


OFFER = HandoffKey(HandoffId("m"), 7)


def decoding(num_choices: int = 1) -> RequestState:
    """Return a request whose choices D decodes alone, with one token each."""
    life = several(num_choices, is_remote=False)
    for choice in range(num_choices):
        life.reported(D, sampled(choice, 0))
    return life


def moving(num_choices: int = 1, choice: int = 0) -> RequestState:
    """Return a request of which D drains and offers one choice, and OTHER takes over."""
    life = decoding(num_choices)
    assert life.reported(D, MigrationOffered(choice_key(choice), OFFER)) == [FindConsumer(choice, D)]
    (book,) = life.consumer_found(choice, OTHER)
    job = book.job if isinstance(book, SubmitJob) else None
    assert (
        isinstance(job, ResumeJob) and job.keys == (choice_key(choice, 2),) and job.offer == OFFER and job.source == D
    )
    assert job.output_tokens == (100 * choice,)
    return life


def test_a_choice_migrates_while_its_worker_keeps_sampling() -> None:
    life = moving()
    assert shape(life.reported(D, sampled(0, 1))) == ["token 1"]
    assert life.accepted(OTHER, choice_key(0, 2)) == []
    assert life.reported(OTHER, sampled(0, 1, 2)) == [], "both draw the same"
    assert life.reported(OTHER, replace(PULLED, key=choice_key(0, 2))) == []
    assert life.reported(D, Finished(choice_key(0), None, 2, 0)) == [] and life.phase is JobGroupPhase.RUNNING
    assert shape(life.reported(OTHER, sampled(0, 2, 2))) == ["token 2"]
    assert life.path == "local;retries=1" and life.workers() == (OTHER,)


@pytest.mark.parametrize("ending", [Cancelled(choice_key(0)), Finished(choice_key(0), None, 1, 0)])
def test_the_end_of_a_migrated_job_is_no_loss(ending: Cancelled | Finished) -> None:
    """The draining worker's end may arrive before the new worker's report that it has everything."""
    life = moving()
    life.accepted(OTHER, choice_key(0, 2))
    assert life.reported(D, ending) == [] and life.phase is JobGroupPhase.RUNNING
    life.reported(OTHER, replace(PULLED, key=choice_key(0, 2)))
    assert shape(life.reported(OTHER, sampled(0, 1, 2))) == ["token 1"]
    life = moving()
    life.reported(OTHER, replace(PULLED, key=choice_key(0, 2)))
    assert life.worker_lost(D, "it has ended") == [] and life.workers() == (OTHER,)


def test_a_consumer_that_does_not_take_over_is_replaced_without_a_failed_attempt() -> None:
    life = moving()
    full = life.refused(OTHER, choice_key(0, 2), TandemError(ErrorKind.OVERLOADED, "full"))
    assert full == [FindConsumer(0, D, frozenset({OTHER}))], "it may have room soon"
    assert life.consumer_found(0, None) == [] and life.seeks() == [FindConsumer(0, D)]
    assert shape(life.reported(D, sampled(0, 1))) == ["token 1"], "it goes on meanwhile"
    (book,) = life.consumer_found(0, P)
    assert isinstance(book, SubmitJob) and book.job.output_tokens == (0, 1) and book.job.attempt == 3
    life.accepted(P, choice_key(0, 3))
    blame, again = life.reported(P, Failed(choice_key(0, 3), ErrorKind.KV_LOST, "no KV came"))
    assert blame == ReportWorkerFailure(frozenset({P, D})) and again == FindConsumer(
        0, D, frozenset({P}), frozenset({P})
    )
    life.consumer_found(0, OTHER)
    assert life.worker_lost(OTHER, "killed") == [FindConsumer(0, D, frozenset({OTHER}), frozenset({P, OTHER}))]
    last = Finished(choice_key(0), FinishReason.STOP, 2, 0)
    assert life.reported(D, last)[-1] == EndRequest(RequestId("r"), last)


def test_a_dead_draining_worker_loses_its_offer() -> None:
    life = moving()
    assert shape(life.worker_lost(D, "killed")) == ["cancel other", "release d", "place without d"]
    (book,) = life.placed(Placement(OTHER, OTHER))
    assert isinstance(book, SubmitJob) and isinstance(book.job, GenerateJob) and book.job.attempt == 3
    life = decoding()
    life.reported(D, MigrationOffered(choice_key(0), OFFER))
    assert shape(life.worker_lost(D, "killed")) == ["release d", "place without d"]


def test_one_choice_migrates_and_the_others_stay() -> None:
    life = moving(3, 1)
    assert life.positions(D) == [(choice_key(0), 1), (choice_key(2), 1), (choice_key(1), 1)]
    life.accepted(OTHER, choice_key(1, 2))
    life.reported(OTHER, replace(PULLED, key=choice_key(1, 2)))
    assert life.reported(D, Cancelled(choice_key(1))) == []
    assert life.reported(D, sampled(2, 1)) == [sampled(2, 1)]
    assert life.reported(OTHER, sampled(1, 1, 2)) == [sampled(1, 1, 2)]
    assert shape(life.worker_lost(OTHER, "killed")) == ["place without other"]
    assert life.positions(D) == [(choice_key(0), 1), (choice_key(2), 2)], "what stayed knows nothing of it"
    assert life.phase is JobGroupPhase.QUEUED and life.reported(D, sampled(0, 1)) == [sampled(0, 1)]


def test_repeated_migration_offers_of_a_reopened_stream_change_nothing() -> None:
    life = moving()
    offer = MigrationOffered(choice_key(0), OFFER)
    assert life.reported(D, offer) == []
    life.accepted(OTHER, choice_key(0, 2))
    assert life.reported(D, offer) == []
    life.reported(OTHER, replace(PULLED, key=choice_key(0, 2)))
    assert life.reported(D, offer) == [] and life.seeks() == []
    newer = HandoffKey(HandoffId("m2"), 9)
    assert life.reported(OTHER, MigrationOffered(choice_key(0, 2), newer)) == [FindConsumer(0, OTHER)], (
        "it may move again"
    )
    life.reported(OTHER, replace(PULLED, key=choice_key(0, 2)))
    assert life.seeks() == [FindConsumer(0, OTHER)], "an old word is not about the new offer"


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_new_offer_ends_the_job_that_was_to_take_over_the_one_before(is_accepted: bool) -> None:
    """A worker offers a sequence anew when its offer is void, perhaps before the consumer says that it failed."""
    life = moving()
    if is_accepted:
        life.accepted(OTHER, choice_key(0, 2))
    newer = HandoffKey(HandoffId("m2"), OFFER.attempt)
    commands = life.reported(D, MigrationOffered(choice_key(0), newer))
    assert commands == [CancelJob(OTHER, (choice_key(0, 2),)), FindConsumer(0, D)]
    assert life.reported(OTHER, Failed(choice_key(0, 2), ErrorKind.KV_LOST, "the lease has ended")) == []
    assert life.seeks() == [FindConsumer(0, D)] and life.reported(D, sampled(0, 1)) == [sampled(0, 1)]


def test_a_migration_done_before_the_reply_counts_and_may_continue() -> None:
    """The consumer's report and its reply use two streams, and a busy worker replies late."""
    life = moving()
    life.reported(OTHER, replace(PULLED, key=choice_key(0, 2)))
    assert life.path == "local;retries=1"
    newer = HandoffKey(HandoffId("m2"), 9)
    assert life.reported(OTHER, MigrationOffered(choice_key(0, 2), newer)) == [FindConsumer(0, OTHER)]
    assert life.accepted(OTHER, choice_key(0, 2)) == [] and life.seeks() == [FindConsumer(0, OTHER)]
    assert life.path == "local;retries=1"


@pytest.mark.parametrize("ending", [Finished(key(), None, 1, 1), Cancelled(key())])
def test_a_prefill_that_ends_before_its_reply_has_begun(ending: Finished | Cancelled) -> None:
    """The decode worker has begun too, and may offer what it runs from then on."""
    life = starting()
    life.reported(P, token(0))
    life.reported(D, PULLED)
    assert life.reported(P, ending) == [] and life.accepted(P, key()) == []
    assert life.phase is JobGroupPhase.RUNNING
    assert life.reported(D, MigrationOffered(key(), OFFER)) == [FindConsumer(0, D)]


def test_an_offer_before_the_prefill_workers_reply_finds_a_consumer() -> None:
    life = starting()
    life.reported(P, token(0))
    life.reported(D, PULLED)
    assert life.phase is JobGroupPhase.STARTING
    assert life.reported(D, MigrationOffered(key(), OFFER)) == [FindConsumer(0, D)]
    assert life.accepted(P, key()) == [] and life.seeks() == [FindConsumer(0, D)]


def test_after_a_loss_choices_with_tokens_continue_alone_and_the_others_together() -> None:
    life = several(5, is_remote=False)
    life.reported(D, sampled(1, 0))
    life.finished(3)
    assert shape(life.worker_lost(D, "killed")) == ["place without d"]
    jobs = [command.job for command in life.placed(Placement(D, D)) if isinstance(command, SubmitJob)]
    assert [(job.choice, job.num_choices, job.output_tokens) for job in jobs] == [
        (0, 1, ()), (1, 1, (100,)), (2, 3, ()),
    ], "a job covers neighbours, of which 1 goes alone and 3 has ended"  # fmt: skip
    assert sorted(job.attempt for job in jobs) == [2, 3, 4]
    assert life.accepted(D, jobs[1].key) == [] and life.phase is JobGroupPhase.RESERVING
    assert shape(life.refused(D, jobs[2].key, TandemError(ErrorKind.OVERLOADED, "full"))) == ["place without d"]
    assert life.reported(D, sampled(1, 1, jobs[1].attempt)) == [sampled(1, 1, jobs[1].attempt)]


def test_the_prefill_job_has_the_remote_prefix_of_each_attempt() -> None:
    life = RequestState(REQUEST, HandoffId("h"))
    (book,) = life.placed(Placement(P, D, prefix=RemotePrefixPlan(OTHER, 7, 112, 112, 0.0)))
    assert isinstance(book, SubmitJob) and isinstance(book.job, ResumeJob)
    (start,) = life.accepted(D, key())
    assert isinstance(start, SubmitJob) and isinstance(start.job, PrefillJob)
    prefix = start.job.prefix
    assert prefix is not None and (prefix.source, prefix.num_blocks) == (OTHER, 7)
    assert prefix.handoff != start.job.handoff, "a remote prefix is not what is offered on"
    life.worker_lost(P, "gone")
    (again,) = life.placed(Placement(D, D))
    assert isinstance(again, SubmitJob) and again.job == GenerateJob(request=REQUEST, attempt=2)
    life.worker_lost(D, "gone")
    (local,) = life.placed(Placement(P, P, prefix=RemotePrefixPlan(D, 3, 48, 48, 0.0)))
    assert isinstance(local, SubmitJob) and isinstance(local.job, GenerateJob) and local.job.prefix is not None
    assert (local.job.prefix.source, local.job.prefix.num_blocks) == (D, 3)


def test_a_lost_prefix_source_concerns_only_the_reader() -> None:
    life = RequestState(REQUEST, HandoffId("h"))
    life.placed(Placement(P, D, prefix=RemotePrefixPlan(OTHER, 7, 112, 112, 0.0)))
    life.accepted(D, key())
    assert life.worker_lost(OTHER, "gone") == [] and OTHER not in life.workers()
