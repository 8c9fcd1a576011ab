"""Test where a request's time goes, with scripted workers: its phases, its one record and its one trace, however it
ends.

Workers report stages of a thousand hours where a phase is to belong to one stage: reports are cut to the measured
time, which for the stages of a prefill begins when the job is submitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, Finished, FinishReason, JobEvent, LaneYield, MigrationOffered, Preemption, Token
from tandem.core.ids import HandoffId, HandoffKey, JobKey
from tandem.core.lane import Lane
from tandem.core.request_stages import JobStages, Stage
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.obs.metrics.metrics import HistogramSnapshot
from tandem.orchestration.phase_ledger import LedgerPhase
from tests.unit.gateway.rig import Rig, StartRig, one_worker, pulled, token
from tests.unit.gateway.scripted_worker import until
from tests.unit.gateway.watched import CLIENT_TRACE, Watched, job_at, phase_of, watched

ALL = 3.6e6
"""A duration in seconds, longer than any phase."""
P = LedgerPhase
IN_GATEWAY = {Stage.RECEIVE, Stage.DELIVER}


@pytest.fixture
def seen(rig: Rig) -> Iterator[Watched]:
    with watched(rig) as seen:
        yield seen


def staged(key: JobKey, index: int, **stages: float) -> Token:
    return replace(token(key, index), stages=JobStages(**stages))


def ended(key: JobKey, count: int) -> Finished:
    return Finished(key, FinishReason.LENGTH, count, 0)


def stages_of(record: RequestRecord) -> set[Stage]:
    """Return the stages with time in them after checking that the stages add up."""
    assert record.stages.total == pytest.approx(record.total_s, abs=1e-9)
    return {stage for stage in Stage if record.stages.of(stage) > 0}


async def traced(seen: Watched, answer_task: asyncio.Task[None]) -> tuple[RequestRecord, dict[str, object]]:
    """Return the answer's record and its root span's attributes after checking that the span's tree is complete and
    continues the client's trace.
    """
    record = await seen.record(answer_task)
    spans = list(seen.spans)
    (root,) = [span for span in spans if span.parent is not None and span.parent.is_remote]
    assert root.context is not None and root.parent is not None and root.attributes is not None
    assert f"{root.context.trace_id:032x}" == CLIENT_TRACE == record.trace
    assert f"{root.parent.span_id:016x}" == "cd" * 8
    inside = [span for span in spans if span is not root]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in inside)
    assert {span.name for span in inside} <= {"queue", "route"}
    stage_sum = sum(float(str(root.attributes[f"tandem.stage.{stage.value}_s"])) for stage in Stage)
    assert stage_sum == pytest.approx(record.total_s, abs=1e-9)
    return record, dict(root.attributes)


async def test_one_worker_has_all_stages(rig: Rig, seen: Watched) -> None:
    worker = await one_worker(rig)
    answer_task = seen.complete()
    key = (await job_at(worker)).key
    await phase_of(rig, P.FIRST)
    preemption = Preemption(yields=(LaneYield(Lane.BATCH, 2, 812, 51),))
    worker.publish(replace(staged(key, 0, prefill_queue_s=ALL), preemption=preemption), token(key, 1))
    await phase_of(rig, P.DECODE)
    worker.publish(token(key, 2), ended(key, 3))
    record, attributes = await traced(seen, answer_task)
    assert record.yields == preemption.yields
    counts = [attributes[f"tandem.yielded_{name}"] for name in ("sequences", "tokens", "blocks")]
    assert counts == [2, 812, 51]
    assert stages_of(record) == {*IN_GATEWAY, Stage.PREFILL_QUEUE, Stage.DECODE}
    assert (record.outcome, record.path, record.workers, record.num_attempts) == ("finished", "local", ("m",), 1)
    assert (record.label, record.endpoint, record.model, record.tenant) == ("mine", "completion", "tiny", "open")
    assert record.usage == (2, 3, 0) and record.num_gaps == 2 and record.first_token_s is not None
    assert record.token_s is not None and 2 * record.token_s <= record.total_s - record.first_token_s
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) and attributes["gen_ai.request.max_tokens"] == 3
    assert (attributes["gen_ai.usage.output_tokens"], attributes["tandem.path"]) == (3, "local")
    assert "error.type" not in attributes
    (job,) = worker.jobs
    assert job.request.traceparent.split("-")[1] == CLIENT_TRACE


async def test_two_workers_share_the_stages(rig: Rig, seen: Watched) -> None:
    prefill, decode = await rig.pair()
    answer_task = seen.complete()
    key = (await job_at(prefill)).key
    await phase_of(rig, P.FIRST)
    prefill.publish(staged(key, 0, prefill_s=ALL), Finished(key, None, 1, 0))
    await phase_of(rig, P.HANDOVER)
    decode.publish(token(key, 0), pulled(key))
    await until(lambda: any(active.state.pulled for active in rig.dispatch.director.requests()))
    assert [active.ledger.phase for active in rig.dispatch.director.requests()] == [P.HANDOVER]
    decode.publish(staged(key, 1, transfer_s=1e-9, decode_queue_s=ALL))
    await phase_of(rig, P.DECODE)
    decode.publish(token(key, 2), ended(key, 3))
    record, _ = await traced(seen, answer_task)
    assert stages_of(record) == set(Stage) - {Stage.QUEUE, Stage.ROUTE, Stage.PREFILL_QUEUE}
    assert record.stages.transfer == pytest.approx(1e-9) and record.stages.decode_queue > record.stages.transfer
    assert (record.path, record.workers) == ("remote", ("p", "d"))


async def test_a_waiting_request_is_in_the_queue_stage(rig: Rig, seen: Watched) -> None:
    worker = await one_worker(rig)
    worker.hold_submit = asyncio.Event()
    answer_task = seen.complete()
    await phase_of(rig, P.ROUTE)
    worker.on_submit = lambda job: (ErrorKind.OVERLOADED, "full")
    worker.hold_submit.set()
    await phase_of(rig, P.QUEUE)
    worker.on_submit = lambda job: None
    await phase_of(rig, P.FIRST)
    answer_task.cancel()
    record, _ = await traced(seen, answer_task)
    names = [span.name for span in seen.spans]
    assert names.count("queue") >= 1 and names.count("route") >= 2, "one for each time that took any"
    assert stages_of(record) == {Stage.RECEIVE, Stage.QUEUE, Stage.ROUTE, Stage.PREFILL}
    assert (record.outcome, record.error, record.first_token_s, record.token_s) == ("cancelled", "", None, None)


async def test_a_retried_attempts_time_counts_for_the_stages_where_it_was_spent(rig: Rig, seen: Watched) -> None:
    prefill, decode = await rig.pair()
    answer_task = seen.complete()
    key = (await job_at(prefill)).key
    await phase_of(rig, P.FIRST)
    prefill.publish(staged(key, 0, prefill_s=ALL))
    await phase_of(rig, P.HANDOVER)
    decode.publish(Failed(key, ErrorKind.INTERNAL, "the step failed"))
    again = (await job_at(prefill, 2)).key
    await phase_of(rig, P.FIRST)
    prefill.publish(staged(key, 0, prefill_queue_s=ALL))  # a report of the abandoned attempt, which is ignored
    prefill.publish(staged(again, 1, prefill_queue_s=0.0, prefill_s=ALL), Finished(again, None, 1, 0))
    await phase_of(rig, P.HANDOVER)
    decode.publish(pulled(again), token(again, 1), token(again, 2))
    await phase_of(rig, P.DECODE)
    decode.publish(ended(again, 3))
    record, _ = await traced(seen, answer_task)
    assert stages_of(record) == set(Stage) - {Stage.ROUTE, Stage.PREFILL_QUEUE, Stage.DECODE_QUEUE}
    assert (record.path, record.num_attempts) == ("remote", 2)
    assert seen.family("tandem.request.retries").points == {(): 1.0}


async def test_a_migrating_choice_stays_in_the_decode_stage(rig: Rig, seen: Watched) -> None:
    old = await one_worker(rig, "a")
    answer_task = seen.complete(max_tokens=4)
    key = (await job_at(old)).key
    await phase_of(rig, P.FIRST)
    old.publish(token(key, 0))
    await phase_of(rig, P.DECODE)
    new = await rig.add("b", "mixed")
    new.hold_submit = asyncio.Event()
    await until(lambda: len(rig.fleet.views()) == 2)
    old.publish(MigrationOffered(key, HandoffKey(HandoffId("m"), 1)))
    job = await job_at(new)
    (active,) = rig.dispatch.director.requests()
    assert active.state.phase.name == "RESERVING" and active.ledger.phase is P.DECODE
    new.hold_submit.set()
    await until(lambda: active.state.phase.name == "RUNNING")
    assert active.ledger.phase is P.DECODE
    new.publish(pulled(job.key), token(job.key, 1), token(job.key, 2), token(job.key, 3), ended(job.key, 4))
    record = await seen.record(answer_task)
    phases = [phase for phase, _ in active.ledger.moves]
    assert phases == [P.QUEUE, P.ROUTE, P.FIRST, P.DECODE, P.DELIVER, P.OVER]
    assert stages_of(record) == {*IN_GATEWAY, Stage.ROUTE, Stage.PREFILL, Stage.DECODE}


async def test_choices_decode_until_the_last_of_them_does(rig: Rig, seen: Watched) -> None:
    worker = await one_worker(rig)
    answer_task = seen.complete(n=2)
    one = (await job_at(worker)).key
    await phase_of(rig, P.FIRST)
    other = one._replace(choice=1)
    worker.publish(staged(one, 0, prefill_queue_s=ALL), staged(other, 0, prefill_s=ALL), ended(one, 1))
    await until(lambda: [len(active.state._choices) for active in rig.dispatch.director.requests()] == [1])
    await phase_of(rig, P.DECODE)
    worker.publish(token(other, 1), ended(other, 2))
    record, attributes = await traced(seen, answer_task)
    assert stages_of(record) == {*IN_GATEWAY, Stage.PREFILL_QUEUE, Stage.DECODE}, "the longest word of the two counts"
    assert record.usage.num_output == 3 and record.num_gaps == 1
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "length")


async def test_the_stages_of_several_prompts_are_those_of_the_last(rig: Rig, seen: Watched) -> None:
    worker = await one_worker(rig)
    answer_task = seen.complete(prompt=["a", "b"], max_tokens=1)
    first, second = (await job_at(worker)).key, (await job_at(worker, 2)).key
    worker.publish(staged(second, 0, prefill_queue_s=ALL), ended(second, 1))
    await until(lambda: len(rig.dispatch.director.requests()) == 1)
    worker.publish(staged(first, 0, prefill_s=ALL))
    await phase_of(rig, P.DECODE)
    worker.publish(ended(first, 1))
    record, _ = await traced(seen, answer_task)
    assert stages_of(record) - IN_GATEWAY - {Stage.ROUTE} == {Stage.PREFILL, Stage.DECODE}
    assert record.usage.num_prompt == 4 and record.usage.num_output == 2
    assert worker.jobs[0].request.traceparent == worker.jobs[1].request.traceparent


@pytest.mark.parametrize(
    ("config", "body", "outcome", "reason", "stages"),
    [
        ({}, {"model": "none"}, "model_not_found", "", {Stage.RECEIVE}),
        ({}, {"temperature": 99}, "invalid_request", "", {Stage.RECEIVE}),
        ({}, {"prompt": "a" * 5000}, "context_length_exceeded", "", {Stage.RECEIVE}),
        ({"max_queued": 0}, {}, "overloaded", "queue_full", {Stage.RECEIVE}),
        ({}, {}, "internal", "", {Stage.RECEIVE, Stage.QUEUE, Stage.ROUTE, Stage.DELIVER}),
    ],
    ids=["no model", "invalid", "too long", "no room", "broken"],
)
async def test_a_refused_request_leaves_one_record_and_one_span(
    start_rig: StartRig,
    config: dict[str, object],
    body: dict[str, object],
    outcome: str,
    reason: str,
    stages: set[Stage],
) -> None:
    rig = await start_rig(**config)
    worker = await rig.add("m", "mixed")
    worker.on_submit = lambda job: (ErrorKind.INTERNAL, "broken")
    await until(lambda: rig.dispatch.ready() is None)
    with watched(rig) as seen:
        record, attributes = await traced(seen, seen.complete(**body))
    assert (record.outcome, record.reason) == (outcome, reason) and record.error
    assert stages_of(record) == stages
    assert attributes["error.type"] == outcome
    assert record.model == ("" if outcome == "model_not_found" else "tiny")
    assert seen.recorder.num_open == 0 and not seen.recorder.num_open_by_tenant()
    (span,) = [span for span in seen.spans if span.name not in ("queue", "route")]
    assert span.name == f"text_completion {record.model}".strip()
    assert not span.status.is_ok and span.status.description == record.error


async def test_a_failing_observer_does_not_affect_the_others(
    rig: Rig, seen: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def answered(self, record: RequestRecord) -> None:
            raise RuntimeError("it does")

    worker = await one_worker(rig)
    events: list[JobEvent] = []
    seen.recorder._observers = (Broken(), *seen.recorder._observers)
    answer_task = seen.complete(max_tokens=1)
    key = (await job_at(worker)).key
    events = [token(key, 0), ended(key, 1)]
    worker.publish(*events)
    record = await seen.record(answer_task)
    assert record.outcome == "finished" and answer_task.exception() is None
    assert "Broken.answered" in caplog.text


async def test_all_gaps_of_long_answers_are_counted_each_choice_s_own(rig: Rig, seen: Watched) -> None:
    """The first choice has the stream alone, then runs beside another one, then behind it."""
    worker = await one_worker(rig)
    answer_task = seen.complete(n=2, max_tokens=500)
    first = (await job_at(worker)).key
    second = first._replace(choice=1)
    worker.publish(*(token(first, index) for index in range(300)))
    worker.publish(*(token(key, index + place) for index in range(100) for key, place in ((first, 300), (second, 0))))
    worker.publish(*(token(first, index) for index in range(400, 500)), ended(first, 500))
    worker.publish(*(token(second, index) for index in range(100, 500)), ended(second, 500))
    record = await seen.record(answer_task)
    assert record.usage.num_output == 1000 and record.num_gaps == 2 * 499
    (gaps,) = seen.family("tandem.inter_token_latency").points.values()
    assert isinstance(gaps, HistogramSnapshot) and gaps.count == 2 * 499
    assert gaps.sum == pytest.approx(2 * 499 * (record.token_s or 0.0))
