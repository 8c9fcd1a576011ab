"""Decisions of the request director that concern its queue and several choices of one request."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, Finished, FinishReason, SampledToken, Token
from tandem.core.ids import HandoffId, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.request import Request, SamplingParams
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import EndRequest, SubmitJob
from tandem.orchestration.director import RequestDirector
from tandem.routing.worker_view import WorkerView
from tandem.scaling.demand_totals import QueueBacklog
from tests.unit.orchestration.known_workers import BookedWorkers

WORKER = WorkerRef(WorkerId("w"), Incarnation(1), "w:1")
REQUEST = Request(
    id=RequestId("r"), model="m", prompt_tokens=(1, 2), sampling=SamplingParams(max_tokens=3), num_choices=2
)


def test_a_request_whose_only_waiting_choice_is_closed_leaves_the_queue_and_goes_on() -> None:
    view = WorkerView(WORKER, "mixed", "m", "f", WorkerLoad(num_blocks=100, num_free_blocks=100), block_size=4)
    workers = BookedWorkers([view])
    director = RequestDirector(workers, GatewayConfig(), lambda request: HandoffId("h"))
    (submit,) = director.submit(REQUEST, 0.0).commands
    assert isinstance(submit, SubmitJob)
    director.on_submit_result(WORKER, submit.job.key, None, 0.0)
    keys = [JobKey(REQUEST.id, submit.job.attempt, choice) for choice in (0, 1)]
    director.on_worker_events(WORKER, [Token(key, 0, SampledToken(7)) for key in keys], 0.0)

    # The worker loses the request: each choice, which has a token by now, waits by itself. One is placed again alone.
    workers.set_load(WORKER, num_free_blocks=0)
    director.on_worker_events(WORKER, [Failed(keys[0], ErrorKind.INTERNAL, "the step failed")], 0.0)
    assert len(director.queue) == 1
    workers.set_load(WORKER, num_free_blocks=100)
    first, second = [command for command in director.place_queued(1.0) if isinstance(command, SubmitJob)]
    for command in (first, second):
        director.on_submit_result(WORKER, command.job.key, None, 1.0)
    workers.set_load(WORKER, num_free_blocks=0)
    director.on_worker_events(WORKER, [Failed(first.job.key, ErrorKind.INTERNAL, "the step failed")], 1.0)
    assert len(director.queue) == 1, "one choice waits, the other one runs"

    assert not [
        command for command in director.finish(REQUEST.id, first.job.choice, 2.0) if isinstance(command, EndRequest)
    ]
    assert not len(director.queue)
    director.check()
    workers.set_load(WORKER, num_free_blocks=100)
    assert director.on_timer(3.0) == [], "nothing of it is placed again"
    tokens = [Token(second.job.key, index, SampledToken(7)) for index in (1, 2)]
    commands = director.on_worker_events(WORKER, [*tokens, Finished(second.job.key, FinishReason.LENGTH, 3, 0)], 4.0)
    assert isinstance(commands[-1], EndRequest) and isinstance(commands[-1].outcome, Finished)


def test_the_backlog_counts_the_waiting_requests_of_each_model() -> None:
    view = WorkerView(WORKER, "mixed", "m", "f", WorkerLoad(num_blocks=100, num_free_blocks=100), block_size=4)
    director = RequestDirector(BookedWorkers([view]), GatewayConfig(), lambda request: HandoffId("h"))
    for name, model, num_tokens in (("running", "m", 9), ("r1", "one", 5), ("r2", "one", 6), ("r3", "two", 2)):
        request = replace(REQUEST, id=RequestId(name), model=model, prompt_tokens=(1,) * num_tokens)
        director.submit(request, 0.0)
    assert director.backlog() == {
        "one": QueueBacklog(num_requests=2, num_tokens=11),
        "two": QueueBacklog(num_requests=1, num_tokens=2),
    }
