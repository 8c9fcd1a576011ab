"""Test jobs on one worker over real gRPC: submitted, streamed, cancelled, refused, watched again."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from tandem.core.config import EngineConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, FinishReason, PromptLogprobs, Token
from tandem.core.ids import Incarnation, JobKey, RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.worker import worker
from tandem.worker.gateways import outbox
from tests.e2e.client import Client, new_request
from tests.unit.worker.conftest import Gate, Node, Nodes, held_in_a_step, pace
from tests.unit.worker.fake_model import MODEL, VOCAB, continuation

PROMPT = list(range(1, 20))


async def refusal(client: Client, request: Request, attempt: int = 1) -> ErrorKind:
    """Return the reason for which the worker refuses a job."""
    with pytest.raises(TandemError) as refused:
        await client.generate(request, attempt)
    return refused.value.kind


async def with_a_slow_job(nodes: Nodes, max_tokens: int) -> tuple[Node, JobKey]:
    """Start a worker with slow steps and a job that has begun."""
    node = await nodes.start()
    pace(node.executor)
    key = await node.client.generate(new_request(MODEL, PROMPT, max_tokens))
    await node.client.num_tokens(key, 2)
    return node, key


async def test_a_finished_job_leaves_no_state(nodes: Nodes) -> None:
    node = await nodes.start()
    key = await node.client.generate(new_request(MODEL, PROMPT, 9))
    end = await node.client.end_of(key)
    assert end == Finished(key, FinishReason.LENGTH, 9, 0)
    assert node.client.tokens(key) == continuation(PROMPT, 9)
    await node.client.settled()


async def test_many_jobs_of_two_gateways_stay_apart(nodes: Nodes) -> None:
    node = await nodes.start()
    clients = [node.client, await node.other_gateway("g2")]
    keys = []
    for i in range(12):
        client, prompt = clients[i % 2], [i, *PROMPT]
        keys.append((client, prompt, await client.generate(new_request(MODEL, prompt, 5))))
    for client, prompt, key in keys:
        await client.end_of(key)
        assert client.tokens(key) == continuation(prompt, 5)
    assert not set(clients[0].events) & set(clients[1].events)
    await node.client.settled()


async def test_a_later_attempt_goes_on_from_the_output_so_far(nodes: Nodes) -> None:
    node = await nodes.start()
    output = continuation(PROMPT, 3)
    key = await node.client.generate(new_request(MODEL, PROMPT, 8), attempt=2, output=output)
    end = await node.client.end_of(key)
    assert isinstance(end, Finished) and end.num_output_tokens == 8
    assert output + node.client.tokens(key) == continuation(PROMPT, 8)


async def test_submit_is_idempotent(nodes: Nodes) -> None:
    node = await nodes.start()
    job = GenerateJob(request=new_request(MODEL, PROMPT, 4), attempt=1)
    await asyncio.gather(*(node.client.submit(job) for _ in range(3)))
    await node.client.end_of(job.key)
    await node.client.submit(job)
    assert node.client.tokens(job.key) == continuation(PROMPT, 4)
    await node.client.settled()


async def test_a_newer_attempt_ends_the_older(nodes: Nodes) -> None:
    node = await nodes.start()
    pace(node.executor)
    request = new_request(MODEL, PROMPT, 900)
    old = await node.client.generate(request)
    await node.client.num_tokens(old, 1)
    shorter = replace(request, sampling=replace(request.sampling, max_tokens=4))
    new = await node.client.generate(shorter, attempt=2)
    assert await node.client.end_of(old) == Cancelled(old)
    assert isinstance(await node.client.end_of(new), Finished)
    assert node.client.tokens(new) == continuation(PROMPT, 4)
    await node.client.settled()


async def test_an_older_attempt_is_refused(nodes: Nodes) -> None:
    node = await nodes.start()
    pace(node.executor)
    request = new_request(MODEL, PROMPT, 900)
    await node.client.generate(request, attempt=2)
    assert await refusal(node.client, request, attempt=1) is ErrorKind.CANCELLED


async def test_cancel_ends_running_and_waiting_jobs(nodes: Nodes) -> None:
    node = await nodes.start(engine=EngineConfig(block_size=4, max_num_batched_tokens=8, max_num_seqs=1))
    pace(node.executor)
    running = await node.client.generate(new_request(MODEL, PROMPT, 900))
    waiting = await node.client.generate(new_request(MODEL, PROMPT, 900))
    await node.client.num_tokens(running, 2)
    await node.client.cancel(running, waiting)
    assert await node.client.end_of(running) == Cancelled(running)
    assert await node.client.end_of(waiting) == Cancelled(waiting)
    assert node.client.tokens(waiting) == []
    await node.client.settled()


async def test_a_cancel_before_the_submit_refuses_it(nodes: Nodes) -> None:
    node = await nodes.start()
    request = new_request(MODEL, PROMPT, 4)
    await node.client.cancel(JobKey(request.id, 1))
    assert await refusal(node.client, request) is ErrorKind.CANCELLED
    await node.client.settled()


async def test_a_job_that_a_watch_reported_as_missing_is_refused_when_it_arrives(nodes: Nodes) -> None:
    node = await nodes.start()
    request = new_request(MODEL, PROMPT, 4)
    key = JobKey(request.id, 1)
    await node.client.watch({key: 0})
    await node.client.failure(key, ErrorKind.WORKER_LOST)
    assert await refusal(node.client, request) is ErrorKind.CANCELLED
    await node.client.settled()


async def test_refusals_name_the_reason_and_keep_nothing(nodes: Nodes) -> None:
    node = await nodes.start()
    cases = [
        (new_request(MODEL, PROMPT, 2000), ErrorKind.CONTEXT_LENGTH),
        (new_request("other", PROMPT, 4), ErrorKind.MODEL_NOT_FOUND),
        (
            replace(new_request(MODEL, PROMPT, 4), sampling=SamplingParams(max_tokens=4, logit_bias=((VOCAB, 1.0),))),
            ErrorKind.INVALID_REQUEST,
        ),
    ]
    for request, kind in cases:
        assert await refusal(node.client, request) is kind
    bad = pb.SubmitRequest(gateway="g", incarnation=node.worker.me.incarnation, key=pb.JobKey(request="x"))
    reply = await node.client.stub.Submit(bad)
    assert reply.refusal.kind == ErrorKind.INVALID_REQUEST.value
    assert reply.load.num_blocks == 512
    await node.client.watch({JobKey(RequestId("x"), 0): 0})
    assert isinstance(await node.client.end_of(JobKey(RequestId("x"), 0)), Failed)
    await node.client.settled()


async def test_calls_for_another_incarnation_are_refused(nodes: Nodes) -> None:
    node = await nodes.start()
    node.client.worker = replace(node.worker.me, incarnation=Incarnation(node.worker.me.incarnation - 1))
    assert await refusal(node.client, new_request(MODEL, PROMPT, 4)) is ErrorKind.WORKER_LOST


async def test_watch_again_resends_without_a_gap_or_a_repeat(nodes: Nodes) -> None:
    node = await nodes.start()
    client = node.client
    pace(node.executor, 0.001)
    key = await client.generate(new_request(MODEL, PROMPT, 200))
    for _ in range(5):
        have = len(client.tokens(key))
        await client.watch({key: have})
        await client.num_tokens(key, min(have + 3, 200))
    await client.end_of(key)
    assert client.tokens(key) == continuation(PROMPT, 200)
    # The end is resent too, and so are tokens that were lost in transit.
    client.events.clear()
    await client.watch({key: 150})
    await client.end_of(key)
    assert client.tokens(key) == continuation(PROMPT, 200)[150:]
    await client.settled()


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_scores_precede_tokens_in_bounded_messages_and_are_resent(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Chunks have eight tokens; a reopened stream sends all scores again."""
    monkeypatch.setattr(outbox, "MAX_SCORES", 3)
    client = (await nodes.start()).client
    key = await client.generate(replace(new_request(MODEL, PROMPT, max_tokens), prompt_logprobs=0))
    for _ in range(2):
        assert await client.end_of(key) == Finished(key, FinishReason.LENGTH, max_tokens, 0)
        assert [score.id for score in client.scores(key)] == PROMPT[1:]
        assert client.tokens(key) == continuation(PROMPT, max_tokens)
        kinds = [type(event) for event in client.events[key]]
        assert kinds == [PromptLogprobs] * 3 + [Token] * max_tokens + [Finished]
        assert all(len(update.scores) <= 1 for update in client.updates)
        client.events.clear()
        await client.watch({key: 0})
    await client.settled()


async def test_a_position_ahead_of_this_worker_is_waited_for(nodes: Nodes) -> None:
    node = await nodes.start()
    gate = Gate(node.executor)
    key = await node.client.generate(new_request(MODEL, PROMPT, 6))
    watching = asyncio.create_task(node.client.watch({key: 2}))
    gate.open()
    await watching
    await node.client.end_of(key)
    assert node.client.tokens(key) == continuation(PROMPT, 6)[2:]


async def test_jobs_that_a_watch_does_not_list_are_cancelled(nodes: Nodes) -> None:
    node = await nodes.start()
    kept = await node.client.generate(new_request(MODEL, PROMPT, 300))
    dropped = await node.client.generate(new_request(MODEL, PROMPT, 900))
    unknown = JobKey(RequestId("nobody"), 1)
    await node.client.num_tokens(dropped, 1)
    await node.client.watch({kept: len(node.client.tokens(kept)), unknown: 0})
    assert await node.client.end_of(dropped) == Cancelled(dropped)
    await node.client.failure(unknown, ErrorKind.WORKER_LOST)
    await node.client.end_of(kept)
    assert node.client.tokens(kept) == continuation(PROMPT, 300)
    await node.client.settled()


async def test_a_second_stream_of_a_gateway_ends_the_first(nodes: Nodes) -> None:
    node = await nodes.start()
    second = Client(node.worker.me)
    key = await node.client.generate(new_request(MODEL, PROMPT, 40))
    await second.watch({key: 0})
    await node.client.until(lambda: node.client.stream_error is not None)
    await second.end_of(key)
    assert second.tokens(key) == continuation(PROMPT, 40)
    await second.__aexit__(None, None, None)


@pytest.mark.parametrize("watched", [True, False], ids=["stream broke", "stream never opened"])
async def test_jobs_of_a_gateway_that_is_gone_are_cancelled_after_the_grace(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    monkeypatch.setattr(worker, "SWEEP_S", 0.02)
    node = await nodes.start(worker=WorkerConfig(gateway_grace_s=0.3))
    lost = Client(node.worker.me, "lost")
    if watched:
        await lost.watch()
    # Its 950 steps take much longer than the grace.
    pace(node.executor)
    await lost.generate(new_request(MODEL, PROMPT, 950))
    assert (await node.client.books()).num_sequences == 1
    await lost.unwatch()
    await node.client.settled()
    await lost.__aexit__(None, None, None)


async def test_a_gateway_without_a_grace_period_keeps_its_stream(nodes: Nodes) -> None:
    node = await nodes.start(worker=WorkerConfig(gateway_grace_s=0.0))
    key = await node.client.generate(new_request(MODEL, PROMPT, 9))
    assert await node.client.end_of(key) == Finished(key, FinishReason.LENGTH, 9, 0)
    assert node.client.stream_error is None


async def test_a_stream_begins_with_the_load_and_has_heartbeats(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.1)
    node = await nodes.start()
    assert node.client.updates[0].load.num_free_blocks == 512
    num = len(node.client.updates)
    await node.client.until(lambda: len(node.client.updates) > num)
    assert node.client.updates[-1] == pb.WatchUpdate()


async def test_a_changed_load_is_sent_with_the_events(nodes: Nodes) -> None:
    node, _ = await with_a_slow_job(nodes, 40)
    assert node.client.load.num_running == 1
    await node.client.settled()
    await node.client.until(lambda: node.client.load.num_running == 0)
    loads = [update.load for update in node.client.updates if update.HasField("load")]
    assert all(one != next_one for one, next_one in itertools.pairwise(loads))
    assert len(loads) < len(node.client.updates)


@pytest.mark.slow
async def test_a_gateway_that_does_not_read_loses_its_stream(nodes: Nodes) -> None:
    node = await nodes.start(worker=WorkerConfig(gateway_grace_s=0.3))
    # Windows of 64 KiB, which two jobs with 20 log probabilities per token fill.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with grpc.aio.insecure_channel(node.worker.me.address, options=options) as channel:
        call = WorkerStub(channel).Watch(pb.WatchRequest(gateway="g2"))
        await anext(aiter(call))
        silent = Client(node.worker.me, "g2")
        for _ in range(2):
            request = new_request(MODEL, PROMPT, 900)
            await silent.generate(replace(request, sampling=replace(request.sampling, logprobs=20)))
        async with asyncio.timeout(10):
            while len(node.worker._gateways) > 1:
                await asyncio.sleep(0.05)
            # Messages under way still arrive, and then the stream is over; it would go on for ever otherwise.
            async for _ in call:
                pass
        await silent.__aexit__(None, None, None)
    await node.client.settled()


async def test_a_step_that_raises_fails_its_jobs_and_no_others(nodes: Nodes) -> None:
    node = await nodes.start()

    def explode(plan: object) -> None:
        raise ZeroDivisionError("planted")

    node.executor.before_step = explode
    key = await node.client.generate(new_request(MODEL, PROMPT, 4))
    assert "planted" in (await node.client.failure(key, ErrorKind.INTERNAL)).message
    node.executor.before_step = lambda plan: None
    key = await node.client.generate(new_request(MODEL, PROMPT, 4))
    assert isinstance(await node.client.end_of(key), Finished)
    assert node.worker.healthy() is None
    await node.client.settled()


async def test_an_engine_that_fails_ends_the_worker_and_every_job(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start()
    gate, key = await held_in_a_step(node)

    def explode(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("tandem.engine.engine.Engine.finish", explode)
    gate.open()
    assert "planted" in await asyncio.wait_for(node.worker.failed(), 10)
    await node.client.failure(key, ErrorKind.INTERNAL)
    assert "planted" in (node.worker.healthy() or "")
    with pytest.raises(TandemError):
        await node.client.generate(new_request(MODEL, PROMPT, 4))


async def test_drain_refuses_new_work_and_waits_for_the_old(nodes: Nodes) -> None:
    # A job that has not begun would be requeued.
    node, key = await with_a_slow_job(nodes, 50)
    draining = asyncio.ensure_future(node.client.stub.Drain(pb.DrainRequest(timeout_ms=20_000)))
    await node.client.until(lambda: node.client.load.draining)
    assert not draining.done() and not node.client.ends(key)
    assert await refusal(node.client, new_request(MODEL, PROMPT, 4)) is ErrorKind.DRAINING
    assert (await draining).num_left == 0
    assert isinstance(await node.client.end_of(key), Finished)
    assert node.client.tokens(key) == continuation(PROMPT, 50)


async def test_drain_gives_up_at_its_timeout(nodes: Nodes) -> None:
    node, _ = await with_a_slow_job(nodes, 900)
    reply = await node.client.stub.Drain(pb.DrainRequest(timeout_ms=50))
    assert reply.num_left == 1


async def test_a_drain_is_undone_and_the_worker_accepts_jobs_again(nodes: Nodes) -> None:
    node, key = await with_a_slow_job(nodes, 50)
    draining = asyncio.ensure_future(node.client.stub.Drain(pb.DrainRequest(timeout_ms=20_000)))
    await node.client.until(lambda: node.client.load.draining)
    await node.client.stub.UndoDrain(pb.UndoDrainRequest())
    assert (await draining).is_undone, "a drain that was undone does not wait for its timeout"
    await node.client.until(lambda: not node.client.load.draining)
    other = await node.client.generate(new_request(MODEL, PROMPT, 4))
    for each, length in ((key, 50), (other, 4)):
        assert isinstance(await node.client.end_of(each), Finished)
        assert node.client.tokens(each) == continuation(PROMPT, length)


async def test_the_drain_of_a_worker_that_stops_cannot_be_undone(nodes: Nodes) -> None:
    node, _ = await with_a_slow_job(nodes, 50)
    stopping = asyncio.ensure_future(node.worker.drain(20.0))
    await node.client.until(lambda: node.client.load.draining)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.client.stub.UndoDrain(pb.UndoDrainRequest())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await stopping).num_left == 0


async def test_stop_fails_what_is_running_and_ends_the_streams(nodes: Nodes) -> None:
    node, key = await with_a_slow_job(nodes, 900)
    await node.worker.stop()
    await node.client.failure(key, ErrorKind.WORKER_LOST)
    await node.client.until(lambda: node.client.stream_error is not None)
    assert isinstance(node.client.stream_error, EOFError)
