"""Test what workers export at /metrics and in traces, over real gRPC and real HTTP: the numbers add up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.clock import wall_ns
from tandem.core.config import EngineConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, KVReceived, Token
from tandem.core.ids import HandoffId
from tandem.core.lane import Lane
from tandem.core.request import PrefillJob, Request
from tandem.wire.gen import worker_pb2 as pb
from tandem.worker.gateways import service
from tandem.worker.kv import producer_session
from tandem.worker.telemetry import gauges
from tandem.worker.telemetry.gauges import _queued_tokens
from tests.e2e.client import hand_over, new_request, resume_from
from tests.otlp import OtlpReceiver, attributes, otlp_receiver
from tests.ports import free_port
from tests.scrape import Scrape
from tests.unit.worker.conftest import Node, Nodes, held_in_a_step, pace
from tests.unit.worker.fake_model import BLOCK_SIZE, MODEL, continuation
from tests.unit.worker.test_prefix_fetches import NUM_BLOCKS, PROMPT, fetch_prefix, warm

BLOCK_BYTES = 64


async def address_of(node: Node) -> str:
    reply = await node.client.stub.Describe(pb.DescribeRequest())
    return str(reply.metrics_address)


async def scrape(node: Node) -> Scrape:
    return await asyncio.to_thread(Scrape.of, await address_of(node))


async def run(node: Node, num_prompt: int, max_tokens: int) -> None:
    """Run a job whose prompt shares no prefix with another."""
    prompt = [num_prompt, *range(500, 499 + num_prompt)]
    key = await node.client.generate(new_request(MODEL, prompt, max_tokens))
    assert isinstance(await node.client.end_of(key), Finished)


async def test_steps_tokens_and_jobs_add_up(nodes: Nodes) -> None:
    node = await nodes.start()
    # Steps of eight tokens: no prompt leaves a single one, which would count as a decode.
    for num_prompt, max_tokens in ((20, 5), (31, 1), (12, 9)):
        await run(node, num_prompt, max_tokens)
    seen = await scrape(node)
    assert seen.sum("tandem_step_prefill_tokens_total") == 20 + 31 + 12
    assert seen.sum("tandem_generated_tokens_total") == 5 + 1 + 9
    # The first token of each comes with its prompt.
    assert seen.sum("tandem_step_decode_tokens_total") == 4 + 0 + 8
    assert seen.sum("tandem_steps_total", kind="prefill") == 3 + 4 + 2
    assert seen.sum("tandem_steps_total", kind="decode") == 12
    for name in ("tandem_step_duration_seconds", "tandem_step_predicted_duration_seconds"):
        assert seen.sum(f"{name}_count") == seen.sum("tandem_steps_total") == 21
    # Two steps of eight and one of four; three and one of seven; one and one of four.
    assert seen.sum("tandem_step_saturated_total") == 2 + 3 + 1
    assert seen.sum("tandem_jobs_total", kind="generate", outcome="finished") == seen.sum("tandem_jobs_total") == 3
    assert seen.sum("tandem_job_queue_duration_seconds_count", kind="generate") == 3
    assert seen.sum("tandem_prefix_queried_tokens_total") == 63 and seen.sum("tandem_prefix_hit_tokens_total") == 0
    assert seen.sum("tandem_worker_info") == seen.sum("tandem_worker_healthy") == 1
    assert seen.sum("tandem_worker_gateways") == 1 and seen.sum("tandem_worker_draining") == 0


async def test_the_metrics_under_vllms_names_agree(nodes: Nodes) -> None:
    node = await nodes.start()
    await run(node, 20, 5)
    await run(node, 20, 5)
    seen = await scrape(node)
    assert seen.sum("vllm:prompt_tokens_total", model_name=MODEL) == 20 + 4
    assert seen.sum("vllm:generation_tokens_total", model_name=MODEL) == 10
    assert seen.sum("vllm:prefix_cache_queries_total") == 40 and seen.sum("vllm:prefix_cache_hits_total") == 16
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= seen.names()
    num_blocks = int(seen.sum("tandem_kv_capacity"))
    assert seen.sum("vllm:cache_config_info", model_name=MODEL, num_gpu_blocks=str(num_blocks)) == 1
    assert seen.sum("vllm:cache_config_info", block_size=str(node.executor.layout.block_size)) == 1


async def test_blocks_by_state_are_all_the_blocks_there_are(nodes: Nodes) -> None:
    node = await nodes.start(engine=EngineConfig(block_size=4, max_num_batched_tokens=8, max_num_seqs=1))
    pace(node.executor)
    running = await node.client.generate(new_request(MODEL, range(30), 900))
    waiting = await node.client.generate(new_request(MODEL, range(40), 900))
    await node.client.num_tokens(running, 2)
    seen = await scrape(node)
    used, free = (seen.sum("tandem_kv_blocks", state=state) for state in ("used", "free"))
    assert used + free == seen.sum("tandem_kv_capacity") == 512 and used >= 8
    assert 0 < seen.sum("tandem_kv_free_ratio") < 1
    assert (seen.sum("tandem_sequences", state="running"), seen.sum("tandem_sequences", state="waiting")) == (1, 1)
    assert seen.sum("tandem_queued_tokens", lane="interactive") == seen.sum("tandem_queued_tokens") >= 40 - 4 * 7
    assert seen.sum("tandem_lane_sequences", lane="interactive") == seen.sum("tandem_lane_sequences") == 1
    assert seen.sum("tandem_lane_kv_blocks", lane="interactive") == seen.sum("tandem_lane_kv_blocks") >= 8
    await node.client.cancel(running, waiting)
    await node.client.settled()
    # Statistics are cached for a tenth of a second, so earlier ones may be exported once more.
    while (seen := await scrape(node)).sum("tandem_kv_blocks", state="used"):
        await asyncio.sleep(0.05)
    assert seen.sum("tandem_kv_blocks", state="free") == 512 and seen.sum("tandem_kv_blocks", state="cached") >= 7
    assert seen.sum("tandem_jobs_total", outcome="cancelled") == 2 and seen.sum("tandem_kv_free_ratio") == 1


async def test_preempted_sequences_are_counted_apart_from_new_ones(nodes: Nodes) -> None:
    node = await nodes.start(engine=EngineConfig(block_size=4, max_num_batched_tokens=8, max_num_seqs=1))
    pace(node.executor)
    paused = await node.client.generate(replace(new_request(MODEL, range(30), 900), lane=Lane.BATCH))
    await node.client.num_tokens(paused, 2)
    running = await node.client.generate(new_request(MODEL, range(40, 50), 900))
    await node.client.num_tokens(running, 1)
    waiting = await node.client.generate(replace(new_request(MODEL, range(60, 70), 900), lane=Lane.BATCH))
    # The figures are those after a step; one may have begun before the last job arrived.
    await node.client.num_tokens(running, len(node.client.tokens(running)) + 2)
    seen = await scrape(node)
    assert [seen.sum("tandem_sequences", state=state) for state in ("running", "waiting", "paused")] == [1, 1, 1]
    await node.client.cancel(paused, running, waiting)
    await node.client.settled()


async def test_tokens_of_experts_are_those_of_the_model(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "WINDOW_S", 0.0)
    dense, node = await nodes.start(), await nodes.start()
    node.executor.expert_tokens = {1: (0, 0, 4), 2: (1, 2, 1)}
    seen = await scrape(node)
    assert [seen.sum("tandem_expert_tokens_total", expert=str(expert)) for expert in range(3)] == [1, 2, 5]
    assert "tandem_expert_imbalance_ratio" not in seen.names()
    node.executor.expert_tokens = {1: (6, 0, 4), 2: (3, 4, 3)}
    seen = await scrape(node)
    assert [seen.sum("tandem_expert_imbalance_ratio", layer=str(layer)) for layer in (1, 2)] == [3.0, 1.0]
    assert not {name for name in (await scrape(dense)).names() if "expert" in name}


async def test_a_transfer_is_counted_in_bytes_where_it_is_read(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    prompt = list(range(1, 60))
    key, _ = await hand_over(producer.client, consumer.client, new_request(MODEL, prompt, 12))
    assert isinstance(await consumer.client.end_of(key), Finished)
    await producer.client.settled()
    gave, took = await scrape(producer), await scrape(consumer)
    assert gave.sum("tandem_jobs_total", kind="prefill", outcome="handed_over") == 1
    assert took.sum("tandem_jobs_total", kind="resume", outcome="finished") == 1
    assert gave.sum("tandem_generated_tokens_total") == 1 and took.sum("tandem_generated_tokens_total") == 11
    pulled = took.sum("tandem_transfer_bytes_total", kind="handoff", transport="local")
    assert pulled == 15 * BLOCK_BYTES == took.sum("tandem_transfer_bytes_total")
    assert took.sum("tandem_transfers_total", kind="handoff", outcome="done") == took.sum("tandem_transfers_total") == 1
    assert 0 < took.sum("tandem_transfer_exposed_bytes_total") <= pulled
    assert took.sum("tandem_transfer_duration_seconds_count") == 1
    assert 0 < took.sum("tandem_transfer_busy_seconds_total") <= took.sum("tandem_transfer_duration_seconds_sum")
    assert gave.sum("tandem_transfers_total") == 0
    # A Resume's prompt was looked up where it was computed.
    assert (gave.sum("tandem_prefix_queried_tokens_total"), took.sum("tandem_prefix_queried_tokens_total")) == (59, 0)


@pytest.mark.usefixtures("patient_fetches")
async def test_a_remote_prefix_counts_as_a_transfer_and_a_hit(nodes: Nodes) -> None:
    producer, consumer = await nodes.start(), await nodes.start()
    await warm(producer)
    key = await fetch_prefix(consumer, producer.worker.me, new_request(MODEL, PROMPT, 3))
    assert isinstance(await consumer.client.end_of(key), Finished)
    seen = await scrape(consumer)
    assert seen.sum("tandem_prefix_remote_hit_tokens_total") == NUM_BLOCKS * BLOCK_SIZE
    assert seen.sum("tandem_prefix_hit_tokens_total") == NUM_BLOCKS * BLOCK_SIZE
    assert seen.sum("tandem_transfer_bytes_total", kind="prefix") == NUM_BLOCKS * BLOCK_BYTES
    assert seen.sum("tandem_transfers_total", kind="prefix", outcome="done") == 1
    computed = len(PROMPT) - NUM_BLOCKS * BLOCK_SIZE
    assert seen.sum("tandem_step_prefill_tokens_total") == computed


async def test_a_transfer_that_fails_is_counted_as_one(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_session, "BACKOFF_S", 0.005)
    consumer = await nodes.start()
    nobody = replace(consumer.worker.me, address=f"127.0.0.1:{free_port()}", id=type(consumer.worker.me.id)("nobody"))
    await consumer.client.end_of(await resume_from(nobody, consumer.client, new_request(MODEL, PROMPT, 3)))
    seen = await scrape(consumer)
    assert seen.sum("tandem_transfers_total", kind="handoff", outcome="failed") == 1
    assert seen.sum("tandem_jobs_total", kind="resume", outcome="failed") == 1


async def test_a_scrape_does_not_wait_for_a_step(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BOOKS_S", 0.05)
    node = await nodes.start()
    await run(node, 20, 5)
    before = await scrape(node)
    gate, key = await held_in_a_step(node)
    seen = await scrape(node)
    assert seen.sum("tandem_kv_capacity") == 512, "the books of before"
    assert seen.sum("tandem_sequences", state="running") + seen.sum("tandem_sequences", state="waiting") == 1
    assert seen.sum("tandem_steps_total") == before.sum("tandem_steps_total")
    assert not (await node.client.stub.Describe(pb.DescribeRequest())).HasField("books"), "the step still runs"
    gate.open()
    await node.client.end_of(key)


async def test_metrics_listen_on_the_configured_port_or_nowhere(nodes: Nodes) -> None:
    port = free_port()
    chosen = await nodes.start(worker=WorkerConfig(metrics_port=port))
    assert await address_of(chosen) == f"127.0.0.1:{port}"
    await scrape(chosen)
    with pytest.raises(TandemError, match="metrics") as refused:
        await nodes.start(worker=WorkerConfig(metrics_port=port))
    assert (refused.value.kind, refused.value.param) == (ErrorKind.INVALID_REQUEST, "worker.metrics_port")
    assert await address_of(await nodes.start(worker=WorkerConfig(metrics_port=-1))) == ""


async def test_the_metrics_address_is_advertised_with_the_worker(nodes: Nodes) -> None:
    port, metrics_port = free_port(), free_port()
    worker = WorkerConfig(port=port, advertise_address=f"localhost:{port}", metrics_port=metrics_port)
    assert await address_of(await nodes.start(worker=worker)) == f"localhost:{metrics_port}"


# ---- traces


TRACE, ROOT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(request: Request, flags: str = "01") -> Request:
    return replace(request, traceparent=f"00-{TRACE}-{ROOT}-{flags}")


def send_to(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", receiver.protocol)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")


def seconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


async def test_one_trace_goes_through_both_workers(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver("http/protobuf") as receiver:
        send_to(receiver, monkeypatch)
        began = wall_ns()
        producer, consumer = await nodes.start(), await nodes.start()
        await run(producer, 20, 3)
        prompt = list(range(1, 60))
        unsampled = traced(new_request(MODEL, prompt[::-1], 3), flags="00")
        await consumer.client.end_of((await hand_over(producer.client, consumer.client, unsampled))[0])
        key, _ = await hand_over(producer.client, consumer.client, traced(new_request(MODEL, prompt, 12)))
        assert isinstance(await consumer.client.end_of(key), Finished)
        await producer.client.settled()
        await producer.worker.stop()
        await consumer.worker.stop()
        prefill, decode, transfer = (receiver.span(name) for name in ("prefill", "decode", "transfer"))
        assert len(receiver.spans) == 3, "nobody traces the other two"
        assert {span.trace_id.hex() for span in (prefill, decode, transfer)} == {TRACE}
        assert prefill.parent_span_id.hex() == decode.parent_span_id.hex() == ROOT
        assert transfer.parent_span_id == decode.span_id
        assert began < decode.start_time_unix_nano < prefill.start_time_unix_nano
        assert prefill.start_time_unix_nano < decode.end_time_unix_nano < wall_ns()
        span_attributes = attributes(prefill.attributes)
        assert (span_attributes["tandem.worker"], span_attributes["tandem.job.outcome"]) == ("w0", "handed_over")
        assert [attributes(event.attributes)["tandem.tokens"] for event in prefill.events] == [8] * 7 + [3]
        during = range(prefill.start_time_unix_nano, prefill.end_time_unix_nano + 1)
        assert all(event.time_unix_nano in during for event in prefill.events)
        token = next(event for event in producer.client.events[key] if isinstance(event, Token))
        assert token.stages is not None
        assert seconds(prefill) == pytest.approx(token.stages.prefill_queue_s + token.stages.prefill_s, abs=1e-5)
        assert attributes(decode.attributes)["tandem.output_tokens"] == 11
        pulled = consumer.client.pulled(key)
        read = attributes(transfer.attributes)
        assert isinstance(pulled, KVReceived) and read["tandem.transfer.bytes"] == pulled.num_bytes == 15 * BLOCK_BYTES
        assert read["tandem.transfer.source"] == "w0" and read["tandem.transfer.transport"] == "local"
        assert seconds(transfer) == pytest.approx(pulled.total_s, abs=1e-5)
        assert decode.start_time_unix_nano <= transfer.start_time_unix_nano <= transfer.end_time_unix_nano
        assert {resource["service.name"] for resource, _ in receiver.spans} == {"tandem-worker"}
        assert {resource["service.instance.id"] for resource, _ in receiver.spans} == {"w0", "w1"}


async def test_a_stopping_workers_traces_name_the_failed_jobs(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver("http/protobuf") as receiver:
        send_to(receiver, monkeypatch)
        node = await nodes.start()
        pace(node.executor)
        key = await node.client.generate(traced(new_request(MODEL, PROMPT, 900)))
        await node.client.num_tokens(key, 3)
        await node.worker.stop()
        decode = receiver.span("decode")
        assert decode.status.message == "the worker stopped" and decode.parent_span_id.hex() == ROOT
        span_attributes = attributes(decode.attributes)
        assert span_attributes["error.type"] == ErrorKind.WORKER_LOST.value
        assert span_attributes["tandem.job.outcome"] == "failed"
        assert span_attributes["tandem.output_tokens"] >= 3 and not receiver.span("prefill").status.message
        tokens = [event for event in node.client.events[key] if isinstance(event, Token)]
        assert [token.stages is not None for token in tokens] == [True] + [False] * (len(tokens) - 1)
        assert [token.token.id for token in tokens] == continuation(PROMPT, len(tokens))


async def test_an_invalid_environment_variable_is_named(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(TandemError, match="OTEL_TRACES_EXPORTER") as refused:
        await nodes.start()
    assert refused.value.kind is ErrorKind.INVALID_REQUEST


async def test_a_receiver_that_hangs_holds_up_no_job(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver("http/protobuf", is_open=False) as receiver:
        send_to(receiver, monkeypatch)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        node = await nodes.start()
        for _ in range(3):
            key = await node.client.generate(traced(new_request(MODEL, PROMPT, 3)))
            assert isinstance(await node.client.end_of(key), Finished)
        await asyncio.to_thread(receiver.wait, lambda it: it.num_calls > 0)
        key = await node.client.generate(traced(new_request(MODEL, PROMPT, 3)))
        assert isinstance(await node.client.end_of(key), Finished)
        assert receiver.spans == []
        prefill = PrefillJob(request=traced(new_request(MODEL, PROMPT, 3)), attempt=1, handoff=HandoffId("h"))
        await node.client.submit(prefill)
        assert await node.client.end_of(prefill.key) == Finished(prefill.key, None, 1, NUM_BLOCKS * BLOCK_SIZE)
        receiver.is_open.set()


def test_a_load_without_a_report_has_no_queued_tokens() -> None:
    assert _queued_tokens(()) == {}
    assert _queued_tokens((3, 8, 8)) == {("interactive",): 3, ("standard",): 5, ("batch",): 0}


async def test_a_workers_redis_errors_are_exported(nodes: Nodes) -> None:
    node = await nodes.start()
    assert (await node.client.stub.Describe(pb.DescribeRequest())).redis_problem == ""
    node.worker._redis_health.failed("registry", "EVALSHA", OSError("planted"))
    reply = await node.client.stub.Describe(pb.DescribeRequest())
    assert reply.redis_problem == "OSError: planted" and reply.num_redis_errors == 1
