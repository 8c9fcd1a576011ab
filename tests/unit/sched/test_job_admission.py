"""Test which jobs a worker accepts, and which it refuses because workers could wait for each other in a cycle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import HandoffId, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.sched.phases.job_admission import check_fits, check_prefill, check_reservation
from tandem.sched.state.limits import Capacity, SchedulerLimits, num_seats, pull_need
from tests.unit.sched.lane_jobs import with_choices
from tests.unit.sched.test_scheduler import prefill, resume, scheduler

LIMITS = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=40)
WORKER = Capacity(num_blocks=10, num_seats=4)
SOURCE = WorkerRef(WorkerId("p"), Incarnation(1), "p:1")


def request(prompt: int, max_tokens: int) -> Request:
    return Request(
        id=RequestId("r"), model="m", prompt_tokens=(1,) * prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )


def refusal(check: object, *args: object) -> ErrorKind | None:
    try:
        check(*args)  # type: ignore[operator]
    except TandemError as error:
        return error.kind
    return None


@pytest.mark.parametrize(("prompt", "max_tokens", "pull"), [(8, 9, 3), (9, 9, 4), (7, 1, 2), (8, 1, 3), (1, 1, 1)])
def test_a_pull_takes_one_block_more_unless_it_will_never_need_it(prompt: int, max_tokens: int, pull: int) -> None:
    job = ResumeJob(request=request(prompt, max_tokens), attempt=1, handoff=HandoffId("h"), source=SOURCE)
    assert pull_need(job, LIMITS, 10, 4) == pull


def test_what_can_never_run_is_refused_for_good() -> None:
    generate = GenerateJob(request=request(30, 10), attempt=1)
    assert refusal(check_fits, generate, LIMITS, 10, 4) is None
    assert refusal(check_fits, generate, LIMITS, 9, 4) is ErrorKind.CONTEXT_LENGTH
    assert (
        refusal(check_fits, GenerateJob(request=request(31, 10), attempt=1), LIMITS, 99, 4) is ErrorKind.CONTEXT_LENGTH
    )
    prefill = PrefillJob(request=request(30, 10), attempt=1, handoff=HandoffId("h"))
    assert refusal(check_fits, prefill, LIMITS, 8, 4) is None
    resumed = GenerateJob(request=request(3, 2), attempt=1, output_tokens=(1, 2))
    assert refusal(check_fits, resumed, LIMITS, 9, 4) is ErrorKind.INVALID_REQUEST


def test_a_prompt_alone_fits_and_goes_on_from_nothing() -> None:
    job = GenerateJob(request=request(40, 0), attempt=1)
    assert refusal(check_fits, job, LIMITS, 10, 4) is None
    assert refusal(check_fits, replace(job, output_tokens=(1,)), LIMITS, 99, 4) is ErrorKind.INVALID_REQUEST
    pull = ResumeJob(request=request(8, 0), attempt=1, handoff=HandoffId("h"), source=SOURCE)
    assert pull_need(pull, LIMITS, 10, 4) == 2


@pytest.mark.parametrize("token", [-1, 50, 10**9])
def test_a_bias_for_a_token_that_is_none_is_refused_by_name(token: int) -> None:
    limits = replace(LIMITS, vocab_size=50)
    biased = replace(request(3, 2), sampling=SamplingParams(max_tokens=2, logit_bias=((49, 1.0), (token, 1.0))))
    with pytest.raises(TandemError, match=f"token {token}; .* 0 to 49") as caught:
        check_fits(GenerateJob(request=biased, attempt=1), limits, 9, 4)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_REQUEST, "logit_bias")
    fine = replace(biased, sampling=SamplingParams(max_tokens=2, logit_bias=((0, 1.0), (49, 1.0))))
    check_fits(GenerateJob(request=fine, attempt=1), limits, 9, 4)


def test_a_reservation_fits_beside_leases_and_reservations() -> None:
    assert refusal(check_reservation, Capacity(3, 1), Capacity(7, 0), WORKER, 0) is None
    assert refusal(check_reservation, Capacity(4, 1), Capacity(7, 0), WORKER, 0) is ErrorKind.OVERLOADED


def test_a_reservation_needs_a_free_sequence_slot() -> None:
    assert refusal(check_reservation, Capacity(1, 1), Capacity(0, 3), WORKER, 0) is None
    assert refusal(check_reservation, Capacity(1, 1), Capacity(0, 4), WORKER, 0) is ErrorKind.OVERLOADED


@pytest.mark.parametrize("num_left", [3, 1])
def test_a_pull_fits_beside_jobs_of_several_choices_by_the_seats_that_they_take(num_left: int) -> None:
    """A prefill takes one seat, however many choices it has, and so does a job of which one choice is left."""
    worker = scheduler(30, budget=64, seqs=4)
    if num_left == 3:
        others: list[Job] = [with_choices(prefill(f"p{i}", 4), 3) for i in range(2)]
    else:
        others = [with_choices(resume(f"d{i}", 4, 8), 3) for i in range(2)]
    for other in others:
        worker.add(other)
        for key in other.keys[num_left:]:
            worker.cancel(key)
    worker.plan()
    assert sum(worker.load().lane_seqs) == 2, "what routers hear"
    worker.add(resume("a", 4))
    worker.add(resume("b", 4))
    assert refusal(worker.add, resume("c", 4)) is ErrorKind.OVERLOADED
    worker.check()


def test_a_pull_of_several_choices_takes_seats_and_a_block_for_each_but_never_more_than_half_of_the_seats() -> None:
    def resume(num_choices: int, max_tokens: int = 9) -> ResumeJob:
        of = request(7, max_tokens)
        return ResumeJob(request=of, attempt=1, num_choices=num_choices, handoff=HandoffId("h"), source=SOURCE)

    assert [num_seats(resume(n), LIMITS) for n in (1, 2, 3, 128)] == [1, 2, 2, 2]
    # Seven tokens are one full block and a part of one, which each choice goes on in for itself.
    assert [pull_need(resume(n), LIMITS, 10, 4) for n in (1, 2, 128)] == [3, 4, 4]
    assert pull_need(resume(2, max_tokens=1), LIMITS, 10, 4) == 3, "one block that each fills for itself"
    assert pull_need(resume(2), LIMITS, 3, 4) == 3, "there are no more"
    assert refusal(check_reservation, Capacity(4, 2), Capacity(0, 2), WORKER, 0) is None
    assert refusal(check_reservation, Capacity(4, 2), Capacity(0, 3), WORKER, 0) is ErrorKind.OVERLOADED


def test_a_prefill_and_a_reservation_that_exclude_each_other_are_not_both_accepted() -> None:
    assert refusal(check_prefill, 6, 4, 10) is None
    assert refusal(check_prefill, 6, 5, 10) is ErrorKind.OVERLOADED
    assert refusal(check_reservation, Capacity(4, 1), Capacity(0, 0), WORKER, 6) is None
    assert refusal(check_reservation, Capacity(5, 1), Capacity(0, 0), WORKER, 6) is ErrorKind.OVERLOADED
