"""Decisions of the request director that concern its queue and several choices of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pytest

from tandem.admission.request_queue import ModelFlow
from tandem.admission.tenant import Tenant
from tandem.admission.tenant_queue import FlowKey
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    Failed,
    Finished,
    FinishReason,
    LaneYield,
    Pauses,
    Preemption,
    PromptLogprobs,
    SampledToken,
    Token,
)
from tandem.core.ids import BlockHash, HandoffId, Incarnation, JobKey, RequestId, TenantId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import Command, EndRequest, PromptComputed, SubmitJob
from tandem.orchestration.director import RequestDirector
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.routing.prefix_accuracy import Prediction
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.worker_view import WorkerView
from tandem.scaling.demand_totals import QueueBacklog
from tests.unit.orchestration.known_workers import BookedWorkers

WORKER = WorkerRef(WorkerId("w"), Incarnation(1), "w:1")
REQUEST = Request(
    id=RequestId("r"), model="m", prompt_tokens=(1, 2), sampling=SamplingParams(max_tokens=3), num_choices=2
)
FREE = WorkerView(WORKER, "mixed", "m", "f", WorkerLoad(num_blocks=100, num_free_blocks=100), block_size=4)
QUEUED = WorkerLoad(num_horizon_tokens=1, lane_tokens=(100,) * len(Lane), lane_longest=(10,) * len(Lane))
FULL = replace(FREE, load=QUEUED)
SLOW = StepCost(1e-3, 1.0, 1e-3, 0.0, 0.0)
"""A second for each prompt token."""


def director_of(*views: WorkerView, config: GatewayConfig | None = None) -> tuple[BookedWorkers, RequestDirector]:
    workers = BookedWorkers(views)
    return workers, RequestDirector(workers, config or GatewayConfig(), lambda request: HandoffId("h"))


def submitted(commands: Sequence[Command]) -> SubmitJob:
    (submit,) = [command for command in commands if isinstance(command, SubmitJob)]
    return submit


def accepted(
    director: RequestDirector, request: Request, timeout_s: float | None = None, ledger: PhaseLedger | None = None
) -> SubmitJob:
    """Submit a request at time 0, and let the worker accept its job."""
    (submit,) = director.submit(request, 0.0, timeout_s=timeout_s, ledger=ledger).commands
    assert isinstance(submit, SubmitJob)
    director.on_submit_result(submit.worker, submit.job.key, None, 0.0)
    return submit


def ends(commands: Sequence[Command]) -> dict[str, ErrorKind]:
    found = [command for command in commands if isinstance(command, EndRequest)]
    return {end.request: end.outcome.kind for end in found if isinstance(end.outcome, TandemError)}


def test_a_request_whose_only_waiting_choice_is_closed_leaves_the_queue_and_goes_on() -> None:
    workers, director = director_of(FREE)
    submit = accepted(director, REQUEST)
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

    commands = director.finish(REQUEST.id, first.job.choice, 2.0)
    assert not any(isinstance(command, EndRequest) for command in commands)
    assert not len(director.queue)
    director.check()
    workers.set_load(WORKER, num_free_blocks=100)
    assert director.on_timer(3.0) == [], "nothing of it is placed again"
    tokens = [Token(second.job.key, index, SampledToken(7)) for index in (1, 2)]
    commands = director.on_worker_events(WORKER, [*tokens, Finished(second.job.key, FinishReason.LENGTH, 3, 0)], 4.0)
    assert isinstance(commands[-1], EndRequest) and isinstance(commands[-1].outcome, Finished)


def test_preemptions_of_all_choices_of_the_present_attempt_count_once() -> None:
    _, director = director_of(FREE)
    ledger = PhaseLedger(0.0)
    submit = accepted(director, REQUEST, ledger=ledger)
    for attempt, choice, index in ((0, 0, 0), (0, 1, 0), (0, 0, 2), (0, 0, 2), (7, 0, 2)):
        key = JobKey(REQUEST.id, submit.job.attempt + attempt, choice)
        preemption = Preemption(Pauses(1, 0.5), (LaneYield(Lane.BATCH, 1, 10, 2),))
        director.on_worker_events(WORKER, [Token(key, index, SampledToken(7), preemption=preemption)], 1.0)
    assert ledger.pauses == Pauses(3, 1.5)
    assert ledger.yields == (LaneYield(Lane.BATCH, 3, 30, 6),)


def test_a_prompt_is_computed_once_although_its_log_probabilities_arrive_after_the_tokens() -> None:
    other = replace(FREE, ref=WorkerRef(WorkerId("other"), Incarnation(1), "other:1"), pool="decode")
    _, director = director_of(replace(FREE, pool="prefill"), other)
    decode = submitted(director.submit(replace(REQUEST, prompt_logprobs=0), 0.0).commands)
    prefill = submitted(director.on_submit_result(decode.worker, decode.job.key, None, 0.0))
    director.on_submit_result(prefill.worker, prefill.job.key, None, 0.0)
    tokens = [Token(key, 0, SampledToken(7), num_cached_tokens=0) for key in decode.job.keys]
    assert director.on_worker_events(decode.worker, tokens, 1.0) == [PromptComputed(decode.job.request, 0)]
    scores = PromptLogprobs(prefill.job.key, 1, (SampledToken(2, -1.0),))
    assert director.on_worker_events(prefill.worker, [scores, *tokens], 1.0) == [scores, *tokens]


def test_a_request_without_progress_is_tried_again_also_where_no_other_worker_is_left() -> None:
    """With the default settings it has then waited for its first token as long as it may wait in the queue."""
    config = GatewayConfig()
    _, director = director_of(FREE, config=config)
    now, submit = 0.0, accepted(director, REQUEST)
    for _ in range(config.max_retries):
        now += config.progress_timeout_s
        assert not ends(director.on_timer(now))
        assert not ends(director.on_timer(now + 0.05)), "the worker that failed rests for a moment"
        now += 1.5
        submit = submitted(director.on_timer(now))
        director.on_submit_result(submit.worker, submit.job.key, None, now)
    assert ends(director.on_timer(now + config.progress_timeout_s)) == {"r": ErrorKind.DEADLINE}
    director.check()


def test_a_request_that_a_draining_worker_gives_up_is_placed_on_another_at_once() -> None:
    """It has waited so long by then, in the queue and at the worker, that it would not be placed later."""
    other = replace(FREE, ref=WorkerRef(WorkerId("other"), Incarnation(1), "other:1"))
    workers, director = director_of(FULL)
    director.submit(REQUEST, 0.0)
    workers.add(FREE)
    submit = submitted(director.on_timer(100.0))
    director.on_submit_result(WORKER, submit.job.key, None, 100.0)
    workers.add(other)
    events = [Failed(key, ErrorKind.DRAINING, "it drains") for key in submit.job.keys]
    commands = [*director.on_worker_events(WORKER, events, 130.0), *director.on_timer(130.05)]
    assert submitted(commands).worker == other.ref and not ends(commands)
    director.check()


def test_a_late_token_of_an_earlier_attempt_is_no_report_on_the_present_one() -> None:
    class Known:
        def __init__(self) -> None:
            self.reports: list[int] = []

        def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
            return {WORKER: PrefixHit(2, 2)}

        def reported(self, predicted: Prediction, num_cached: int) -> None:
            self.reports.append(num_cached)

    known = Known()
    config = GatewayConfig(progress_timeout_s=5.0)
    director = RequestDirector(BookedWorkers([FREE]), config, lambda request: HandoffId("h"), prefixes=known)
    request = replace(REQUEST, prompt_tokens=(1,) * 10, num_choices=1)
    first = submitted(director.submit(request, 0.0, hashes=[BlockHash(b"a"), BlockHash(b"b")]).commands)
    director.on_submit_result(WORKER, first.job.key, None, 0.0)
    assert not any(isinstance(command, SubmitJob) for command in director.on_timer(5.0)), "it makes no progress"
    second = submitted(director.on_timer(6.0))
    assert director.on_worker_events(WORKER, [Token(first.job.key, 0, SampledToken(7), 0)], 7.0) == []
    assert known.reports == []
    token = Token(second.job.key, 0, SampledToken(7), 8)
    assert director.on_worker_events(WORKER, [token], 8.0) == [PromptComputed(request, 8), token]
    assert known.reports == [8]


def test_the_requests_of_a_lost_worker_are_placed_on_another_at_once() -> None:
    other = replace(FREE, ref=WorkerRef(WorkerId("other"), Incarnation(1), "other:1"))
    workers, director = director_of(FREE)
    assert accepted(director, replace(REQUEST, num_choices=1)).worker == WORKER
    workers.add(other)
    workers.remove(WORKER)
    placed = [each for each in director.on_worker_lost(WORKER, "it died", 1.0) if isinstance(each, SubmitJob)]
    assert [each.worker for each in placed] == [other.ref]
    director.check()


def test_the_backlog_counts_the_waiting_requests_of_each_model() -> None:
    _, director = director_of(FREE)
    for name, model, num_tokens in (("running", "m", 9), ("r1", "one", 5), ("r2", "one", 6), ("r3", "two", 2)):
        request = replace(REQUEST, id=RequestId(name), model=model, prompt_tokens=(1,) * num_tokens)
        director.submit(request, 0.0)
    assert director.backlog() == {
        "one": QueueBacklog(num_requests=2, num_tokens=11),
        "two": QueueBacklog(num_requests=1, num_tokens=2),
    }


HOLDS = GatewayConfig(wake_timeout_s=60.0, queue_timeout_s=20.0, no_worker_wait_s=5.0)


def test_a_held_request_runs_once_a_worker_serves_and_its_path_shows_the_wait() -> None:
    workers, director = director_of(config=HOLDS)
    admitted = director.submit(REQUEST, 0.0)
    assert not admitted.commands and director.num_held() == {"m": 1}
    assert director.backlog() == {"m": QueueBacklog(num_requests=1, num_tokens=2)}, "the planner reads this"
    assert director.on_timer(59.0) == []
    workers.add(FULL)
    assert director.on_timer(59.5) == [] and director.num_held() == {}
    workers.add(FREE)
    (submit,) = director.on_timer(60.0)
    assert isinstance(submit, SubmitJob) and admitted.open_request.state.path == "local;held"
    director.cancel(REQUEST.id, 61.0)
    director.check()

    later = director.submit(replace(REQUEST, id=RequestId("later")), 62.0)
    assert later.commands and later.open_request.state.path == "local"


def test_held_requests_end_by_the_timeout_a_cancellation_a_deadline_or_the_queue_s_limit() -> None:
    _, director = director_of(config=replace(HOLDS, max_queued=3))
    for name, timeout_s in (("late", None), ("left", None), ("limited", 10.0)):
        director.submit(replace(REQUEST, id=RequestId(name)), 0.0, timeout_s=timeout_s)
    with pytest.raises(TandemError) as refused:
        director.submit(replace(REQUEST, id=RequestId("fourth")), 1.0)
    assert refused.value.kind is ErrorKind.OVERLOADED
    assert ends(director.cancel(RequestId("left"), 2.0)) == {"left": ErrorKind.CANCELLED}
    assert ends(director.on_timer(10.0)) == {"limited": ErrorKind.DEADLINE}
    assert director.on_timer(59.9) == []
    (end,) = director.on_timer(60.0)
    assert isinstance(end, EndRequest) and isinstance(end.outcome, TandemError)
    assert end.outcome.kind is ErrorKind.NO_WORKER and end.outcome.retry_after_s == 1.0
    assert "within 60 s (gateway.wake_timeout_s): no live worker serves the model" in end.outcome.message
    assert director.num_held() == {} and not len(director.queue)
    director.check()


@pytest.mark.parametrize(
    ("early_rejection", "at", "kind"), [("on", 111.0, ErrorKind.SLO_MISS), ("off", 160.0, ErrorKind.DEADLINE)]
)
def test_a_queued_request_ends_before_its_deadline_only_with_early_rejection(
    early_rejection: Literal["on", "off"], at: float, kind: ErrorKind
) -> None:
    config = GatewayConfig(early_rejection=early_rejection, queue_timeout_s=300.0)
    _, director = director_of(replace(FULL, step_cost=SLOW), config=config)
    director.submit(replace(REQUEST, prompt_tokens=(1,) * 50), 0.0, timeout_s=160.0)
    assert director.on_timer(at - 1.5) == []
    assert ends(director.on_timer(at)) == {"r": kind}


def test_a_request_that_insists_on_a_pair_does_not_block_those_that_single_workers_serve() -> None:
    strict = Tenant(id=TenantId("strict"), disaggregation="strict")
    _, director = director_of(FULL)
    with pytest.raises(TandemError) as refused:
        director.submit(replace(REQUEST, tenant=strict.id), 0.0, strict)
    assert refused.value.kind is ErrorKind.NO_WORKER and director.requests() == []
    _, director = director_of()
    director.submit(replace(REQUEST, tenant=strict.id), 0.0, strict)
    assert len(director.requests()) == 1, "it is held while no worker serves anybody"
    _, director = director_of(FREE, config=GatewayConfig(disaggregation="strict"))
    director.submit(REQUEST, 0.0)
    assert len(director.requests()) == 1, "all requests need a pair, so it blocks no other"


def test_the_wait_for_capacity_begins_with_the_first_worker() -> None:
    workers, director = director_of(config=HOLDS)
    director.submit(REQUEST, 0.0)
    workers.add(FULL)
    assert director.on_timer(50.0) == director.on_timer(69.9) == []
    (end,) = director.on_timer(70.0)
    assert isinstance(end, EndRequest) and isinstance(end.outcome, TandemError)
    assert "(gateway.wake_timeout_s and queue_timeout_s)" in end.outcome.message


def test_workers_that_are_lost_again_and_again_do_not_extend_the_wait_forever() -> None:
    workers, director = director_of(config=HOLDS)
    director.submit(REQUEST, 0.0)
    for at in range(2, 79, 2):
        workers.add(FULL)
        assert director.on_timer(at) == []
        workers.remove(WORKER)
        assert director.on_timer(at + 1) == []
    assert ends(director.on_timer(80.0)) == {"r": ErrorKind.NO_WORKER}


def test_without_a_wake_timeout_the_shorter_limits_hold() -> None:
    _, director = director_of(config=replace(HOLDS, wake_timeout_s=0.0))
    director.submit(REQUEST, 0.0)
    assert director.on_timer(4.9) == []
    assert ends(director.on_timer(5.0)) == {"r": ErrorKind.NO_WORKER}


# ---- KV time

TENANT = ModelFlow("m", FlowKey(Lane.INTERACTIVE, TenantId("t")))
HELD = replace(REQUEST, prompt_tokens=(1,) * 100, tenant=TenantId("t"), sampling=SamplingParams(max_tokens=50))


def charging_director() -> tuple[BookedWorkers, RequestDirector]:
    """Return a director that counts each token-second of KV as one token."""
    return director_of(FREE, config=GatewayConfig(kv_time_tokens=1000.0))


def charged(director: RequestDirector) -> int:
    return dict(director.queue.served()).get(TENANT, 0)


def test_kv_time_is_charged_while_workers_have_a_request_and_not_while_it_waits() -> None:
    workers, director = charging_director()
    workers.add(FULL)
    assert not director.submit(replace(HELD, num_choices=1), 0.0).commands
    director.on_timer(5.0)
    assert charged(director) == 0
    workers.add(FREE)
    first = submitted(director.on_timer(10.0))
    director.on_submit_result(WORKER, first.job.key, None, 10.5)
    director.on_timer(12.0)
    assert charged(director) == 200, "of 100 tokens for two seconds; the prompt was 100"
    tokens = [Token(first.job.key, index, SampledToken(7)) for index in range(20)]
    director.on_worker_events(WORKER, tokens, 12.0)
    director.on_timer(13.0)
    assert charged(director) == 320, "120 tokens more, while 20 sampled ones cost nothing beside the KV time"

    workers.add(FULL)
    director.on_worker_events(WORKER, [Failed(first.job.key, ErrorKind.INTERNAL, "the step failed")], 14.0)
    for now in (14.0, 15.0, 20.0):
        director.on_timer(now)
        assert charged(director) == 440, "the time of the failed attempt counts, that in the queue does not"
    workers.add(FREE)
    second = submitted(director.on_timer(20.0))
    end = Finished(second.job.key, FinishReason.STOP, 20, 0)
    assert director.on_worker_events(WORKER, [end], 20.5)
    assert charged(director) == 500, "from the last tick to the end"
    director.on_timer(30.0)
    assert charged(director) == 500 and not director.requests()


def test_choices_share_the_kv_of_their_prompt_and_those_that_ended_hold_none() -> None:
    _, director = charging_director()
    submit = accepted(director, HELD)
    keys = [JobKey(REQUEST.id, submit.job.attempt, choice) for choice in (0, 1)]
    tokens = [Token(key, index, SampledToken(7)) for key in keys for index in range(10)]
    director.on_worker_events(WORKER, tokens, 0.0)
    director.on_timer(10.0)
    assert charged(director) == 10 * (100 + 2 * 10)
    director.on_worker_events(WORKER, [Finished(keys[0], FinishReason.STOP, 10, 0)], 10.0)
    director.on_timer(20.0)
    assert charged(director) == 1200 + 10 * (100 + 10)


def test_a_cancelled_and_a_failed_request_are_charged_up_to_their_end() -> None:
    for end in ("cancel", "deadline", "abort"):
        _, director = charging_director()
        accepted(director, replace(HELD, num_choices=1), timeout_s=6.0)
        if end == "cancel":
            director.cancel(REQUEST.id, 6.0)
        elif end == "deadline":
            assert ends(director.on_timer(6.0)) == {"r": ErrorKind.DEADLINE}
        else:
            director.abort(REQUEST.id, ValueError("a bug"), 6.0)
        assert charged(director) == 600 and not director.requests(), end


def test_a_tenant_that_holds_much_kv_waits_for_one_that_holds_little() -> None:
    for kv_time_tokens, expected in ((0.0, "t"), (1000.0, "u")):
        workers, director = director_of(FREE, config=GatewayConfig(kv_time_tokens=kv_time_tokens))
        one = replace(HELD, num_choices=1)
        accepted(director, one)
        other = replace(one, tenant=TenantId("u"), id=RequestId("u"), prompt_tokens=(1,) * 300)
        accepted(director, other)
        director.cancel(RequestId("u"), 0.1)
        workers.add(FULL)
        for tenant in ("t", "u"):
            director.submit(replace(one, id=RequestId(f"{tenant}-next"), tenant=TenantId(tenant)), 1.0)
        director.on_timer(20.0)
        assert director.queue.first("m") == f"{expected}-next"


def test_the_fairness_index_shows_a_tenant_that_gets_less_than_another_while_both_wait() -> None:
    """The first request of a tenant holds KV all the time, while both tenants have a request that waits."""
    workers, director = charging_director()
    director.submit(replace(HELD, num_choices=1), 0.0)
    workers.add(FULL)
    for tenant in ("t", "u"):
        director.submit(replace(HELD, id=RequestId(f"{tenant}-next"), tenant=TenantId(tenant)), 0.0)
    for tick in range(40 * 20):
        director.on_timer(tick / 20)
    assert director.queue.fairness(40.0)["m", Lane.INTERACTIVE] == pytest.approx(0.5)
