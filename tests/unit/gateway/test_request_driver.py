"""Test the dispatcher over scripted workers: placement, refusals, deadlines, cancels, and the order of tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Failed, Finished, FinishReason, MigrationOffered
from tandem.core.ids import HandoffId, HandoffKey, RequestId
from tandem.core.request import GenerateJob, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.gateway.context.request_context import RequestContext
from tandem.orchestration import request_queue
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.routing import circuit_breaker
from tests.unit.gateway.rig import Rig, StartRig, busy_pair, collect, failure, is_probe, one_worker, pulled, token
from tests.unit.gateway.scripted_worker import until


async def test_the_decode_worker_reserves_first_and_tokens_arrive_in_order(rig: Rig) -> None:
    prefill, decode, request = await busy_pair(rig)
    key = request.state.key
    assert isinstance(decode.jobs[-1], ResumeJob) and isinstance(prefill.jobs[-1], PrefillJob)
    assert decode.jobs[-1].source == prefill.ref
    decode.publish(token(key, 1))
    prefill.publish(token(key, 0), Finished(key, None, 1, 16))
    await until(lambda: prefill.ref not in request.state.workers())
    decode.publish(token(key, 0), pulled(key), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 16))
    events = [event async for event in request]
    assert events == [token(key, 0), token(key, 1), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 16)]
    assert request.path == "remote"


async def test_one_mixed_worker_serves_alone(rig: Rig) -> None:
    worker = await one_worker(rig)
    request = await rig.running()
    assert isinstance(worker.jobs[-1], GenerateJob) and request.path == "local"
    worker.publish(token(request.state.key, 0), Finished(request.state.key, FinishReason.STOP, 1, 0))
    assert await collect(request) == [0]


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_a_job_refused_for_capacity_is_retried_until_it_is_accepted(rig: Rig, who: str) -> None:
    prefill, decode = await rig.pair()
    full = prefill if who == "prefill" else decode
    full.on_submit = lambda job: (ErrorKind.OVERLOADED, "full")
    request = await rig.open()
    await until(lambda: len([j for j in full.jobs if not is_probe(j)]) >= 3)
    full.on_submit = lambda job: None
    await until(lambda: request.state.phase.name == "RUNNING")
    attempts = [job.attempt for job in full.jobs if not is_probe(job)]
    assert attempts == list(range(1, len(attempts) + 1)), "each placement is an attempt of its own"
    if who == "prefill":
        cancelled = [key.attempt for verb, key in decode.seen if verb == "cancel"]
        assert cancelled == attempts[:-1], "each booking was undone once"
    request.close()


async def test_a_refusal_for_good_ends_the_request(rig: Rig) -> None:
    _, decode = await rig.pair()
    decode.on_submit = lambda job: (ErrorKind.CONTEXT_LENGTH, "too long")
    refused = await failure(await rig.open())
    assert "too long" in refused.message and refused.kind.http == 400


async def test_a_request_not_placed_in_time_fails_with_the_reason(start_rig: StartRig) -> None:
    rig = await start_rig(queue_timeout_s=0.2)
    refused = await failure(await rig.open())
    assert "no live worker serves the model" in refused.message and refused.retry_after_s
    assert refused.kind is ErrorKind.NO_WORKER and refused.kind.http == 503


async def test_the_request_queue_is_bounded(start_rig: StartRig) -> None:
    rig = await start_rig(max_queued=1)
    first = await rig.open()
    with pytest.raises(TandemError) as refused:
        await rig.open()
    assert refused.value.kind is ErrorKind.OVERLOADED
    assert refused.value.reason == "queue_full" and refused.value.retry_after_s
    first.close()


async def test_a_full_worker_gets_no_jobs_until_it_reports_capacity(rig: Rig) -> None:
    worker = await one_worker(rig)
    busy = replace(worker.load, lane_tokens=(100,) * 3, lane_longest=(50,) * 3, num_queued_tokens=100,
                   num_horizon_tokens=60)  # fmt: skip
    worker.load = busy
    worker.publish()
    await until(lambda: any(view.load == busy for view in rig.fleet.views()))
    requests = [await rig.open() for _ in range(2)]
    await asyncio.sleep(0.1)
    assert not worker.jobs and [request.state.phase.name for request in requests] == ["QUEUED"] * 2
    worker.load = replace(busy, num_queued_tokens=20, lane_tokens=(20,) * 3, lane_longest=(20,) * 3)
    worker.publish()
    await until(lambda: all(request.state.phase.name == "RUNNING" for request in requests))
    assert [job.request.id for job in worker.jobs] == [request.state.request.id for request in requests]
    for request in requests:
        request.close()


async def test_the_clients_deadline_ends_queued_and_running_requests(rig: Rig) -> None:
    late = await failure(await rig.open(timeout_s=0.05))
    assert late.kind is ErrorKind.DEADLINE and late.reason == "deadline"
    _, decode = await rig.pair()
    running = await rig.open(timeout_s=0.5)
    assert (await failure(running)).kind is ErrorKind.DEADLINE
    await until(lambda: "cancel" in decode.verbs(str(running.state.request.id)))


async def test_a_request_without_progress_fails_and_is_cancelled_at_both_workers(start_rig: StartRig) -> None:
    rig = await start_rig(progress_timeout_s=0.25, max_retries=1)
    prefill, decode = await rig.pair()
    request = await rig.open()
    with pytest.raises(TandemError, match=r"no progress for 0\.25 s .*; 2 attempts") as late:
        await collect(request)
    assert late.value.kind is ErrorKind.DEADLINE and late.value.kind.http == 504
    name = str(request.state.request.id)
    await until(lambda: "cancel" in prefill.verbs(name) and "cancel" in decode.verbs(name))


async def test_a_failure_at_one_worker_ends_the_attempt_and_the_request_is_retried(rig: Rig) -> None:
    prefill, decode, request = await busy_pair(rig)
    name = str(request.state.request.id)
    prefill.publish(token(request.state.key, 0))
    await until(lambda: request.state.num_delivered == 1)
    decode.publish(Failed(request.state.key, ErrorKind.INTERNAL, "the step failed"))
    await until(lambda: prefill.verbs(name) == ["prefill", "cancel", "prefill"])
    assert decode.verbs(name) == ["resume", "resume"], "who said so has nothing of it left"
    job = prefill.jobs[-1]
    assert job.output_tokens == (100,) and job.attempt == 2
    await until(lambda: request.state.phase.name == "RUNNING")
    decode.publish(pulled(job.key), token(job.key, 1), Finished(job.key, FinishReason.STOP, 2, 0))
    assert await collect(request) == [0, 1]
    assert request.path == "remote;retries=1" and request.num_attempts == 2


async def test_a_request_that_keeps_failing_ends_with_the_last_error(start_rig: StartRig) -> None:
    rig = await start_rig(max_retries=2)
    worker = await rig.add("m", "mixed")
    worker.after_submit = lambda job: [Failed(job.key, ErrorKind.INTERNAL, "the step failed")]
    await until(lambda: rig.dispatch.ready() is None)
    broken = await failure(await rig.open())
    assert "the step failed; 3 attempts" in broken.message
    assert broken.kind is ErrorKind.INTERNAL and len(worker.jobs) == 3


@pytest.mark.parametrize("phase", ["QUEUED", "RESERVING", "STARTING", "RUNNING"])
async def test_a_disconnected_client_is_cancelled_once_at_each_worker(rig: Rig, phase: str) -> None:
    prefill, decode = await rig.pair()
    gate = asyncio.Event()
    if phase == "RESERVING":
        decode.hold_submit = gate
    elif phase == "STARTING":
        prefill.hold_submit = gate
    elif phase == "QUEUED":
        decode.on_submit = lambda job: (ErrorKind.OVERLOADED, "full")
    request = await rig.open()
    name = str(request.state.request.id)
    held = prefill if phase == "STARTING" else decode
    await until(lambda: request.state.phase.name == phase and held.verbs(name))
    request.close()
    request.close()
    gate.set()
    assert (await failure(request)).kind is ErrorKind.CANCELLED
    begun = {"QUEUED": (), "RESERVING": (decode,), "STARTING": (decode, prefill), "RUNNING": (decode, prefill)}[phase]
    for worker in begun:
        await until(lambda worker=worker: "cancel" in worker.verbs(name))
    await until(
        lambda: not rig.left_over() and (prefill not in begun or "release" in [each for each, _ in prefill.seen])
    )
    for worker in (prefill, decode):
        assert worker.verbs(name).count("cancel") == (1 if worker in begun else 0)
    assert [verb for verb, _ in prefill.seen].count("release") == (1 if prefill in begun else 0)


async def test_a_draining_gateway_finishes_running_requests_and_accepts_none(rig: Rig) -> None:
    prefill, decode, request = await busy_pair(rig)
    draining = asyncio.create_task(rig.dispatch.drain(20))
    await until(lambda: rig.dispatch.ready() == "draining")
    with pytest.raises(TandemError) as refused:
        await rig.open()
    assert refused.value.kind is ErrorKind.DRAINING
    key = request.state.key
    prefill.publish(token(key, 0), Finished(key, None, 1, 0))
    decode.publish(pulled(key), Finished(key, FinishReason.STOP, 1, 0))
    assert await collect(request) == [0]
    assert await draining == 0


async def test_a_drain_that_times_out_aborts_requests(rig: Rig) -> None:
    prefill, decode, request = await busy_pair(rig)
    assert await rig.dispatch.drain(0.05) == 1
    assert (await failure(request)).kind is ErrorKind.DRAINING
    name = str(request.state.request.id)
    await until(lambda: "cancel" in prefill.verbs(name) and "cancel" in decode.verbs(name))


async def test_a_client_may_end_one_choice_while_others_continue(rig: Rig) -> None:
    worker = await one_worker(rig)
    request = await rig.running(num_choices=3)
    keys = worker.jobs[-1].keys
    assert isinstance(worker.jobs[-1], GenerateJob) and [key.choice for key in keys] == [0, 1, 2]
    worker.publish(token(keys[1], 0), token(keys[0], 0), token(keys[2], 0))
    stream = aiter(request)
    assert await anext(stream) == token(keys[1], 0)
    request.finish(0)
    assert await anext(stream) == token(keys[2], 0), "what had come of it is not told any more"
    await until(lambda: ("cancel", keys[0]) in worker.seen)
    ends = [Finished(keys[1], FinishReason.STOP, 1, 0), Finished(keys[2], FinishReason.STOP, 1, 0)]
    worker.publish(*ends)
    assert [event async for event in stream] == ends


async def test_a_request_waits_less_long_for_a_missing_worker_than_for_a_full_one(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "REFUSAL_BACKOFF_S", 0.1)
    rig = await start_rig(no_worker_wait_s=0.1, queue_timeout_s=60.0)
    with pytest.raises(
        TandemError, match=r"within 0\.1 s .gateway\.no_worker_wait_s.: no live worker serves the model"
    ) as refused:
        await collect(await rig.open())
    assert refused.value.kind is ErrorKind.NO_WORKER and refused.value.retry_after_s
    worker = await rig.add("m", "mixed")
    worker.on_submit = lambda job: (ErrorKind.OVERLOADED, "full")
    await until(lambda: rig.dispatch.ready() is None)
    request = await rig.open()
    # The check runs every tenth of a second: by then the request has waited for longer.
    await until(lambda: len(worker.jobs) > 3)
    request.close()


async def test_a_failing_worker_is_excluded_and_reported_in_metrics_and_errors(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "BURST_S", 0.0)
    rig = await start_rig(queue_timeout_s=0.4)
    worker = await rig.add("m", "mixed")
    worker.after_submit = lambda job: [Failed(job.key, ErrorKind.INTERNAL, "the step failed")]
    await until(lambda: rig.dispatch.ready() is None)
    with pytest.raises(TandemError, match=r"m excluded for \S+ s after failures"):
        await collect(await rig.open())
    assert rig.dispatch.breakers()[worker.ref.id] is not circuit_breaker.BreakerState.CLOSED


async def test_a_failing_placement_ends_only_its_own_request(rig: Rig) -> None:
    worker = await one_worker(rig)
    broken, other = await rig.running(), await rig.running()

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    broken.state.reported = breaks  # type: ignore[method-assign, assignment]
    end = Finished(broken.state.key, FinishReason.STOP, 0, 0)
    worker.publish(end, Finished(other.state.key, FinishReason.STOP, 0, 0))
    ended = await failure(broken)
    assert "ZeroDivisionError" in ended.message and ended.kind is ErrorKind.INTERNAL
    assert await collect(other) == []
    await until(lambda: "cancel" in worker.verbs(str(broken.state.request.id)))


async def test_a_sequence_of_a_draining_worker_migrates_to_a_free_worker(rig: Rig) -> None:
    old = await one_worker(rig, "a")
    request = await rig.running()
    key, offer = request.state.key, HandoffKey(HandoffId("m"), 1)
    new = await rig.add("b", "mixed")
    new.on_submit = lambda job: (ErrorKind.OVERLOADED, "full") if len(new.jobs) < 3 else None
    await until(lambda: len(rig.fleet.views()) == 2)
    old.publish(token(key, 0), MigrationOffered(key, offer))
    await until(lambda: len(new.jobs) == 3)
    job = new.jobs[-1]
    assert isinstance(job, ResumeJob) and (job.source, job.offer) == (old.ref, offer)
    old.publish(token(key, 1))
    new.publish(token(job.key, 1), pulled(job.key), token(job.key, 2), Finished(job.key, FinishReason.LENGTH, 3, 0))
    assert await collect(request) == [0, 1, 2] and request.path == "local;retries=1"
    assert "of 0 pairs" in repr(rig.fleet.routing.links), "how fast it came says nothing of the pair that was placed"


async def test_sequences_that_drain_together_migrate_to_several_workers(rig: Rig) -> None:
    """Each placement counts the sequences already on their way to a worker, before that worker has replied."""
    old = await one_worker(rig, "a")
    requests = [await rig.running() for _ in range(6)]
    others = [await rig.add(name, "mixed") for name in ("b", "c", "d")]
    await until(lambda: len(rig.fleet.views()) == 4)
    keys = [request.state.key for request in requests]
    old.publish(*(MigrationOffered(key, HandoffKey(HandoffId(f"m-{key.request}"), 1)) for key in keys))
    await until(lambda: sum(len(worker.jobs) for worker in others) == 6)
    assert [len(worker.jobs) for worker in others] == [2, 2, 2]
    await until(lambda: all(view.num_inflight == 0 for view in rig.fleet.views()))
    for request in requests:
        request.close()


async def test_a_job_that_cannot_be_encoded_no_longer_counts_as_inflight(rig: Rig) -> None:
    """Token ids come from clients, and a large one does not fit its proto field."""
    await rig.pair()
    huge = Request(id=RequestId("huge"), model="tiny", prompt_tokens=(1 << 40,), sampling=SamplingParams(max_tokens=3))
    caller = RequestContext(request_id=huge.id, received_at=0.0)
    refused = await failure(await rig.dispatch.open(huge, caller, PhaseLedger(0.0)))
    assert refused.kind is ErrorKind.INVALID_REQUEST
    assert [(view.num_inflight, view.unreported) for view in rig.fleet.views()] == [(0, ()), (0, ())]
