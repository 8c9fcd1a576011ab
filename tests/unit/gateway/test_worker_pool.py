"""Test the worker pool and its links over scripted workers: broken streams, silent, restarted or lost workers, probed
pairs, and a failing registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.orchestration import driver
from tandem.gateway.workers import worker_link, worker_pool
from tandem.orchestration.request_state import JobGroupPhase
from tests.unit.gateway.rig import Rig, StartRig, busy_pair, collect, failure, is_probe, lose, one_worker, pulled, token
from tests.unit.gateway.scripted_worker import until

MOVED_NOTHING = "no block has moved between a prefill and a decode worker of model tiny yet"
NO_WORKER = "model tiny has no live worker"


async def test_readiness_names_what_is_missing(rig: Rig) -> None:
    assert rig.dispatch.ready() == "no live worker"
    await rig.add("p", "prefill", works=False)
    await until(lambda: rig.dispatch.ready() == "model tiny has no live decode worker")
    decode = await rig.add("d", "decode")
    decode.on_submit = lambda job: (ErrorKind.INTERNAL, "no transport")
    await until(lambda: rig.dispatch.ready() == MOVED_NOTHING)
    assert [model.name for model in rig.dispatch.models()] == ["tiny"]


async def test_a_gateway_that_was_ready_stays_ready_while_one_worker_can_serve(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.1)
    prefill, decode = await rig.pair()
    await until(lambda: rig.fleet._was_ready)
    for lost, pool, name in ((prefill, "prefill", "q"), (decode, "decode", "e")):
        await lose(rig, lost)
        await until(lambda: rig.fleet.num_live()[pool] == 0)  # noqa: B023 # read in this turn
        assert rig.dispatch.ready() is None
        assert rig.dispatch.problem() == f"model tiny has no live {pool} worker"
        assert [(found.model, found.lacks) for found in rig.dispatch.shortages()] == [("tiny", pool)]
        request = await rig.running()
        assert request.path == f"fallback;reason=no_{pool}_worker"
        request.close()
        await rig.add(name, pool)
        await until(lambda: rig.dispatch.problem() is None)
    for worker in list(rig.workers):
        await lose(rig, worker)
    await until(lambda: rig.dispatch.ready() == NO_WORKER)


async def test_a_new_gateway_waits_for_a_pair_only_so_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.add("d", "decode")
    await until(lambda: rig.fleet.num_live()["decode"] == 1)
    await until(lambda: rig.fleet._serves_since is not None)
    assert rig.dispatch.ready() == "model tiny has no live prefill worker"
    monkeypatch.setattr(worker_pool, "FIRST_PAIR_WAIT_S", 0.0)
    assert rig.dispatch.ready() is None


async def test_a_strict_gateway_without_a_pair_is_not_ready(start_rig: StartRig) -> None:
    rig = await start_rig(disaggregation="strict")
    prefill, _ = await rig.pair()
    await lose(rig, prefill)
    await until(lambda: rig.dispatch.ready() == "model tiny has no live prefill worker")


async def test_workers_are_looked_for_often_only_while_nothing_can_be_served(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "DISCOVERY_PERIOD_S", 3600.0)
    monkeypatch.setattr(worker_pool, "SEARCH_PERIOD_S", 0.01)
    waits: list[float] = []
    sleep = asyncio.sleep

    async def recording_sleep(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", recording_sleep)
    rig = await start_rig()
    await rig.pair()
    await until(lambda: 3600.0 in waits)
    late = await rig.add("e", "decode")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await until(lambda: late.positions)


async def test_a_probe_that_fails_is_tried_again_until_a_block_moves(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = await rig.add("p", "prefill"), await rig.add("d", "decode")
    decode.on_submit = lambda job: (ErrorKind.INTERNAL, "no transport")
    await until(lambda: len(decode.jobs) >= 3)
    assert rig.dispatch.ready() == MOVED_NOTHING
    assert rig.fleet.pairs.failed.keys() == {(prefill.ref, decode.ref)}
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "no transport" in r.getMessage()]
    assert len(warnings) == 1, "a failure that repeats is no news"
    decode.on_submit = lambda job: None
    await until(lambda: rig.dispatch.ready() is None)
    pairs = rig.fleet.pairs
    assert pairs.linked == {(prefill.ref, decode.ref)} and not pairs.failed
    tried = len(decode.jobs)
    request = await rig.running()
    assert len([job for job in decode.jobs[tried:] if is_probe(job)]) == 0, "a pair is probed until it works"
    request.close()


async def test_a_pair_that_moves_no_block_falls_back(rig: Rig) -> None:
    _, decode = await rig.add("p", "prefill"), await rig.add("d", "decode")
    decode.on_submit = lambda job: (ErrorKind.INTERNAL, "no transport") if is_probe(job) else None
    await until(lambda: rig.fleet.pairs.failed)
    request = await rig.running()
    assert request.path == "fallback;reason=no_link_between_the_workers"
    request.close()


async def test_a_pair_that_lost_kv_moves_a_block_again_before_it_is_used(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    decode.on_submit = lambda job: (ErrorKind.INTERNAL, "no way") if is_probe(job) else None
    rig.fleet.suspect(frozenset({prefill.ref}))
    assert rig.fleet.pairs.linked == {(prefill.ref, decode.ref)}, "one worker is no pair"
    rig.fleet.suspect(frozenset({prefill.ref, decode.ref}))
    request = await rig.running()
    assert request.path == "fallback;reason=no_link_between_the_workers" and rig.dispatch.ready() is None
    request.close()
    decode.on_submit = lambda job: None
    await until(lambda: rig.fleet.pairs.linked == {(prefill.ref, decode.ref)})


async def test_a_suspected_pair_is_probed_at_once(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "DISCOVERY_PERIOD_S", 3600.0)
    rig = await start_rig()
    prefill, decode = await rig.pair()
    await until(lambda: not rig.dispatch._probes)
    for _ in range(2):  # the first may meet the last look of the search
        rig.fleet.suspect(frozenset({prefill.ref, decode.ref}))
        assert not rig.fleet.pairs.linked
        await until(lambda: rig.fleet.pairs.linked)


async def test_a_draining_worker_is_neither_probed_nor_given_work(rig: Rig) -> None:
    prefill = await rig.add("p", "prefill")
    prefill.load = WorkerLoad(draining=True)
    decode = await rig.add("d", "decode")
    request = await rig.running()
    assert request.path == "fallback;reason=no_prefill_worker"
    assert prefill.jobs == [] and not [job for job in decode.jobs if is_probe(job)]
    request.close()


async def test_a_broken_stream_goes_on_without_a_gap_or_a_repeat(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "RECONNECT_S", 20.0)
    prefill, decode, request = await busy_pair(rig)
    key = request.state.key
    prefill.publish(token(key, 0), Finished(key, None, 1, 0))
    decode.publish(pulled(key), token(key, 0), token(key, 1))
    await until(lambda: request.state.num_delivered == 2)
    watched = len(decode.positions)
    decode.break_streams()
    await until(lambda: len(decode.positions) > watched)
    assert decode.positions[-1] == {key: 2}
    # A worker may resend more than was requested.
    decode.publish(token(key, 1), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 0))
    assert await collect(request) == [0, 1, 2]


async def test_queued_requests_are_placed_when_a_stream_is_back(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "TICK_S", 3600.0)
    monkeypatch.setattr(worker_link, "RETRY_S", 0.1)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 20.0)
    rig = await start_rig()
    worker = await one_worker(rig)
    worker.break_streams()
    await until(lambda: rig.dispatch.ready() == NO_WORKER)
    request = await rig.open()
    assert request.state.phase.name == "QUEUED"
    await until(lambda: request.state.phase.name == "RUNNING")
    request.close()


async def test_a_worker_that_falls_silent_is_lost(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await start_rig(worker_timeout_s=0.5, max_retries=0)
    prefill, decode, request = await busy_pair(rig)
    key = request.state.key
    prefill.publish(token(key, 0), Finished(key, None, 1, 0))
    decode.publish(pulled(key), token(key, 0))
    await until(lambda: request.state.pulled is not None)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.0)
    decode.mute = True
    lost = await failure(request)
    assert "silent for 0.5 s" in lost.message and lost.kind is ErrorKind.WORKER_LOST and lost.kind.http == 502


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_whose_process_has_ended_is_lost_before_any_timeout(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    """Its requests are placed on other workers without a tick of the driver."""
    monkeypatch.setattr(driver, "TICK_S", 3600.0)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 3600.0)
    rig = await start_rig()
    prefill, decode = await rig.pair()
    lost, other = (prefill, decode) if role == "prefill" else (decode, prefill)
    request = await rig.running()
    key = request.state.key
    prefill.publish(token(key, 0))
    if role == "decode":
        prefill.publish(Finished(key, None, 1, 0))
        decode.publish(pulled(key), token(key, 0), token(key, 1))
    num_delivered = 2 if role == "decode" else 1
    await until(lambda: request.state.num_delivered == num_delivered)
    await lost.stop()
    await until(lambda: isinstance(other.jobs[-1], GenerateJob))
    job = other.jobs[-1]
    assert job.output_tokens == tuple(range(100, 100 + num_delivered))
    (line,) = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert str(lost.ref) in line and "its process has ended" in line
    with pytest.raises(TandemError, match="is gone"):
        await rig.fleet.submit(lost.ref, job)
    await until(lambda: request.state.phase.name == "RUNNING")
    other.publish(*(token(job.key, i) for i in range(num_delivered, 3)), Finished(job.key, FinishReason.STOP, 3, 0))
    assert await collect(request) == [0, 1, 2]


async def test_a_lost_prefill_process_costs_no_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode, request = await busy_pair(rig)
    prefill.publish(token(request.state.key, 0))
    await until(lambda: request.state.num_delivered == 1)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.05)
    await prefill.stop()
    await until(lambda: isinstance(decode.jobs[-1], GenerateJob))
    job = decode.jobs[-1]
    assert job.output_tokens == (100,) and "cancel" in decode.verbs(str(request.state.request.id))
    await until(lambda: request.state.phase.name == "RUNNING")
    decode.publish(token(job.key, 1), Finished(job.key, FinishReason.STOP, 2, 0))
    assert await collect(request) == [0, 1]
    assert request.path == "fallback;reason=no_prefill_worker;retries=1"


@pytest.mark.parametrize("phase", ["RESERVING", "STARTING"])
async def test_a_loss_before_all_jobs_are_accepted_costs_only_the_placement(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    prefill, decode = await rig.pair()
    spare = await rig.add("e", "decode")
    lost, other = (decode, spare) if phase == "RESERVING" else (prefill, decode)
    lost.hold_submit = asyncio.Event()
    spare.load = replace(spare.load, num_running=9)
    await until(lambda: len(rig.fleet.pairs.linked) == 2)
    request = await rig.open()
    await until(lambda: request.state.phase.name == phase)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.05)
    await lost.stop()
    await until(lambda: request.state.phase.name == "RUNNING")
    assert request.state.placement is not None and request.state.placement.decode == other.ref
    assert request.state.key.attempt >= 2
    request.close()
    lost.hold_submit.set()


async def test_a_late_submit_reply_does_not_override_a_newer_report(rig: Rig) -> None:
    """The reply to Submit may be older than stream updates that arrived before it, and an idle worker sends no further
    update.
    """
    prefill, _ = await rig.pair()
    prefill.mute, prefill.hold_submit = True, asyncio.Event()
    request = await rig.open()
    await until(lambda: prefill.verbs(str(request.state.request.id)) == ["prefill"])
    prefill.load = replace(prefill.load, num_queued_tokens=0, number=3)
    prefill.publish()
    await until(lambda: rig.look(prefill).number == 3)
    prefill.load = replace(prefill.load, num_queued_tokens=8000, number=2)
    prefill.hold_submit.set()
    await until(lambda: request.state.phase is JobGroupPhase.RUNNING)
    assert rig.look(prefill).num_queued_tokens == 0
    request.close()


async def test_a_newer_life_takes_the_place_of_the_older(rig: Rig) -> None:
    prefill, decode, request = await busy_pair(rig)
    rig.workers.remove(decode)
    newer = await rig.add("d", "decode")
    assert newer.ref.incarnation > decode.ref.incarnation
    await until(lambda: request.num_attempts == 2 and request.state.phase.name == "RUNNING")
    assert decode.ref not in request.state.workers()
    request.close()
    await until(lambda: rig.fleet.pairs.linked == {(prefill.ref, newer.ref)})
    again = await rig.running()
    assert again.state.placement is not None and again.state.placement.decode == newer.ref
    again.close()
    await decode.stop()


async def test_a_model_whose_last_worker_is_gone_is_served_for_as_long_as_its_requests_wait(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise requests that arrive while a worker restarts would be refused, and only earlier ones would wait."""
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.1)
    rig = await start_rig(no_worker_wait_s=60.0)
    worker = await one_worker(rig)
    await lose(rig, worker)
    await until(lambda: not rig.fleet._links)
    assert [model.name for model in rig.dispatch.models()] == ["tiny"] and rig.dispatch.ready() == NO_WORKER
    request = await rig.open()
    assert request.state.phase is JobGroupPhase.QUEUED
    await rig.add("n", "mixed")
    await until(lambda: request.state.phase is JobGroupPhase.RUNNING)
    request.close()


async def test_requests_for_a_model_that_a_planner_can_wake_are_held_by_a_ready_gateway(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.1)
    caplog.set_level("INFO")
    rig = make_rig(no_worker_wait_s=0.0, wake_timeout_s=60.0)
    models: dict[str, ServedModel] = {}
    rig.fleet.wakeable = lambda: models
    rig.fleet.optional_roles = lambda: {name: {"prefill", "decode"} for name in models}
    await rig.start()
    worker = await one_worker(rig)
    models |= rig.fleet.live_models()
    await lose(rig, worker)
    await until(lambda: not rig.fleet._links)

    assert [model.name for model in rig.dispatch.models()] == ["tiny"] and rig.dispatch.ready() is None
    assert rig.dispatch.problem() == f"{NO_WORKER}; the planner starts one for the next request"
    assert rig.dispatch.shortages() == [] and rig.dispatch.num_held() == {}, "the pool is empty on purpose"
    held, left = await rig.open(), await rig.open()
    await until(lambda: rig.dispatch.num_held() == {"tiny": 2})
    assert [(found.model, found.lacks) for found in rig.dispatch.shortages()] == [("tiny", "worker")]
    left.close()
    await until(lambda: rig.dispatch.num_held() == {"tiny": 1})
    await rig.add("n", "mixed")
    await until(lambda: held.state.phase is JobGroupPhase.RUNNING)
    assert held.path == "local;held" and rig.dispatch.num_held() == {}
    held.close()
    await until(lambda: "no request for model tiny is held any more" in caplog.text)
    assert caplog.text.count("requests for model tiny are held until a worker can serve them") == 1

    for last in list(rig.workers):
        await lose(rig, last)
    await until(lambda: not rig.fleet._links)
    models.clear()  # the planner is gone too
    assert rig.dispatch.models() == () and rig.dispatch.ready() == NO_WORKER


async def test_a_strict_gateway_is_ready_while_the_missing_role_can_be_woken(start_rig: StartRig) -> None:
    rig = await start_rig(disaggregation="strict", wake_timeout_s=60.0)
    await rig.add("d", "decode")
    await until(lambda: rig.dispatch.ready() == "model tiny has no live prefill worker")
    models = rig.fleet.live_models()
    rig.fleet.wakeable = lambda: models
    assert rig.dispatch.ready() is None


async def test_only_what_the_planner_may_end_is_not_missed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(wake_timeout_s=60.0)
    roles: set[str] = set()
    rig.fleet.optional_roles = lambda: {"tiny": roles}
    await rig.start()

    def missing() -> list[str]:
        return [shortage.lacks for shortage in rig.dispatch.shortages()]

    decode = await rig.add("d", "decode", works=False)
    await until(lambda: missing() == ["prefill"])
    roles.add("decode")
    assert missing() == ["prefill"]
    roles.add("prefill")
    assert missing() == [] and rig.dispatch.num_wakeable() == {"prefill": 1, "decode": 1, "mixed": 0}
    prefill = await rig.add("p", "prefill", works=False)
    await until(lambda: missing() == ["link"])
    for worker in (prefill, decode):
        await lose(rig, worker)
    await until(lambda: not rig.fleet.views())
    await until(lambda: missing() == [])
    roles.remove("decode")
    assert missing() == ["worker"] and rig.dispatch.num_wakeable() == {"prefill": 1, "decode": 0, "mixed": 0}
    roles.add("decode")
    unreachable = await rig.add("e", "decode")
    await unreachable.stop()
    await until(lambda: missing() == ["worker"])
    assert rig.dispatch.num_wakeable() == {"prefill": 0, "decode": 0, "mixed": 0}


async def test_a_gateway_that_cannot_reach_a_registered_worker_does_not_wait_for_a_planner(
    make_rig: Callable[..., Rig], start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.1)
    other = await start_rig()
    await other.add("m", "mixed")
    await until(other.fleet.live_models)
    models = other.fleet.live_models()

    rig = make_rig(wake_timeout_s=60.0)
    rig.fleet.wakeable = lambda: models
    assert rig.dispatch.ready() == NO_WORKER, "the registry was not read"
    unreachable = await rig.add("n", "mixed")
    await unreachable.stop()
    await rig.start()
    await until(lambda: rig.fleet._links)
    assert rig.dispatch.ready() == NO_WORKER, "the worker may be about to answer"
    await until(lambda: rig.fleet._links[unreachable.ref.id].is_gone)
    assert rig.dispatch.ready() == NO_WORKER and not rig.fleet._was_ready

    rig.workers.clear()
    await until(lambda: rig.dispatch.ready() is None)
    rig.workers.append(unreachable)
    await until(lambda: rig.dispatch.ready() == NO_WORKER)
    await one_worker(rig, "o")


async def test_an_ended_worker_that_has_not_left_the_registry_yet_is_no_missing_one(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs are lost at once. The gateway stays ready for the time in which a worker that stops is still listed."""
    monkeypatch.setattr(worker_link, "RECONNECT_S", 3600.0)
    rig = make_rig(wake_timeout_s=60.0)
    models: dict[str, ServedModel] = {}
    rig.fleet.wakeable = lambda: models
    await rig.start()
    worker = await one_worker(rig)
    models |= rig.fleet.live_models()
    link = rig.fleet._links[worker.ref.id]
    await worker.stop()
    await until(lambda: link.is_gone)
    assert rig.dispatch.ready() is None and not link.is_missing
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.0)
    await until(lambda: rig.dispatch.ready() == NO_WORKER)


async def test_a_draining_gateway_ends_held_requests(start_rig: StartRig) -> None:
    rig = await start_rig(wake_timeout_s=60.0)
    held = await rig.open()
    assert await rig.dispatch.drain(0.05) == 1
    assert (await failure(held)).kind is ErrorKind.DRAINING


async def test_a_model_without_workers_is_eventually_not_served(start_rig: StartRig) -> None:
    rig = await start_rig(no_worker_wait_s=0.1)
    worker = await rig.add("m", "mixed")
    await until(lambda: rig.dispatch.models())
    await lose(rig, worker)
    await until(lambda: not rig.dispatch.models())


async def test_an_incarnation_that_ended_during_its_probe_leaves_nothing(rig: Rig) -> None:
    await rig.add("p", "prefill")
    older = await rig.add("d", "decode", works=False)
    await until(lambda: [job for job in older.jobs if is_probe(job)])
    rig.workers.remove(older)
    await rig.add("d", "decode")
    await until(lambda: rig.dispatch.ready() is None)
    await until(lambda: not rig.dispatch._probes)
    assert not rig.fleet.pairs.failed
    await older.stop()


async def test_nothing_is_placed_on_an_older_life_whose_submit_had_no_answer(rig: Rig) -> None:
    older = await one_worker(rig)
    older.hold_submit = asyncio.Event()
    request = await rig.open()
    await until(lambda: older.jobs)
    newer = await rig.add("m", "mixed")
    await until(lambda: request.state.phase.name == "RUNNING")
    assert request.state.placement is not None and request.state.placement.decode == newer.ref
    await until(lambda: not rig.dispatch._submits)
    assert rig.fleet.candidates().pools("tiny", Lane.INTERACTIVE) == {"mixed": 1}
    assert rig.fleet.candidates().find("tiny", older.ref) is None
    request.close()
    older.hold_submit.set()


async def test_a_life_with_an_earlier_stamp_takes_the_place_of_one_that_is_gone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = await rig.add("m", "mixed")
    later = await rig.add("m", "mixed")
    await until(lambda: [view.ref for view in rig.fleet.views()] == [later.ref])
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.1)
    await lose(rig, later)
    await until(lambda: [view.ref for view in rig.fleet.views()] == [earlier.ref])


async def test_an_address_that_another_life_answers_at_is_not_that_worker(rig: Rig) -> None:
    worker = await rig.add("m", "mixed")
    listed = worker.ref
    await until(lambda: rig.dispatch.ready() is None)
    worker.ref = replace(listed, incarnation=listed.incarnation + 1)  # type: ignore[arg-type]
    await until(lambda: rig.dispatch.ready() is None and rig.fleet.views()[0].ref == worker.ref)


async def test_a_failing_registry_stops_no_request_and_is_named_in_errors(rig: Rig) -> None:
    rig.registry_fails = True
    await until(lambda: "workers cannot be listed: " in (rig.dispatch.ready() or ""))
    rig.registry_fails = False
    await rig.pair()
    rig.registry_fails = True
    await until(lambda: rig.fleet._discovery_error is not None)
    request = await rig.running()
    assert request.path == "remote" and rig.dispatch.ready() is None
    request.close()
    rig.registry_fails = False
    await until(lambda: rig.fleet._discovery_error is None)


async def test_a_worker_that_is_gone_and_not_listed_is_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await one_worker(rig)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.1)
    rig.workers.remove(worker)
    assert rig.dispatch.ready() is None, "who answers lives, listed or not"
    await worker.stop()
    await until(lambda: not rig.fleet._links)
    assert rig.dispatch.ready() == NO_WORKER
