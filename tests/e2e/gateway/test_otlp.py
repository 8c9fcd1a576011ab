"""Test what real processes push by OTLP: one connected trace for each request, and metrics, without delays."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.calm.test_grpc import completion as grpc_completion
from tests.e2e.calm.test_grpc import connected
from tests.e2e.gateway.http import LONG_ANSWER, LONG_PROMPT, Answer, Post, completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, Gateway, Worker, cluster, until
from tests.otlp import OtlpReceiver, Value, attributes, otlp_receiver

pytestmark = pytest.mark.timeout(240)

STAGES = ("receive", "queue", "route", "prefill_queue", "prefill", "transfer", "decode_queue", "decode", "deliver")
SKEW_S = 0.05
"""Seconds by which two processes' wall clocks may disagree about the same moment."""
SERVER, CLIENT = Span.SpanKind.SPAN_KIND_SERVER, Span.SpanKind.SPAN_KIND_CLIENT
ERROR = 2
PUSHED = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "otlp",
    "OTEL_BSP_SCHEDULE_DELAY": "50",
    "OTEL_METRIC_EXPORT_INTERVAL": "200",
}


@dataclass(slots=True)
class Traced:
    """Own a gateway that sends OTLP over gRPC and workers that send it over HTTP, each to its own receiver."""

    cluster: Cluster
    gateway: Gateway
    prefill: Worker
    decode: Worker
    by_grpc: OtlpReceiver
    by_http: OtlpReceiver

    def spans(self, trace: str) -> list[ReceivedSpan]:
        found = [*self.by_grpc.spans, *self.by_http.spans]
        return [ReceivedSpan(resource, span) for resource, span in found if span.trace_id.hex() == trace]

    def complete(self, body: dict[str, Any], trace: str, *, flags: str = "01") -> Answer:
        return send(self.gateway.url, body, headers=parent(trace, flags))

    def tree(self, trace: str, *names: str) -> dict[str, ReceivedSpan]:
        """Return the spans of a trace by name, once they have arrived; additional ones fail the test. A "queue" span
        is optional.
        """
        until(lambda: {*names} <= {span.name for span in self.spans(trace)}, f"{names} in {self.spans(trace)}")
        spans = [span for span in self.spans(trace) if span.name != "queue"]
        assert sorted(span.name for span in spans) == sorted(names)
        return {span.name: span for span in spans}


class ReceivedSpan:
    """Hold a received span with its resource."""

    def __init__(self, resource: Mapping[str, Value], span: Span) -> None:
        self.service, self.instance = resource["service.name"], resource["service.instance.id"]
        self.name, self.kind, self.id = span.name, span.kind, span.span_id.hex()
        self.parent = span.parent_span_id.hex()
        self.start, self.end = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
        self.error = span.status.message if span.status.code == ERROR else None
        self.attributes: dict[str, Any] = attributes(span.attributes)
        self.events = [(event.time_unix_nano / 1e9, event.name, attributes(event.attributes)) for event in span.events]

    def __repr__(self) -> str:
        return f"<{self.name} of {self.service}>"

    def is_within(self, other: ReceivedSpan) -> bool:
        return other.start - SKEW_S <= self.start <= self.end <= other.end + SKEW_S


CLIENT_SPAN = "00f067aa0ba902b7"


def parent(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}"}


def trace_of(number: int) -> str:
    return f"{number:032x}"


@contextmanager
def pushing(**variables: str) -> Iterator[None]:
    """Set environment variables for the programs that are started inside."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def sent_to(receiver: OtlpReceiver) -> Any:
    where = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": receiver.protocol}
    return pushing(**PUSHED, **where)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, redis_url: str, model: Path) -> Iterator[Traced]:
    directory = tmp_path_factory.mktemp("otlp")
    own = ("--namespace", "otlp", "--log-format", "json", "--log-requests", "all")
    with (
        otlp_receiver("grpc") as by_grpc,
        otlp_receiver("http/protobuf") as by_http,
        cluster(directory, redis_url, model, *SETTINGS, *own) as running,
    ):
        with sent_to(by_http):
            prefill, decode = running.worker("p", "prefill"), running.worker("d", "decode")
        with sent_to(by_grpc):
            gateway = running.gateway("gateway")
        running.wait_serving()
        made = Traced(running, gateway, prefill, decode, by_grpc, by_http)
        until(lambda: made.complete(completion(8, 0, 2), trace_of(1)).path == "remote", "a request that is split")
        yield made
        running.stop()
        assert {program.exit_code for program in running.programs if program is not made.decode} == {0}
        lines = [json.loads(line) for program in running.programs for line in program.log.splitlines()]
        assert [line for line in lines if line["severity"] in ("ERROR", "CRITICAL")] == []


def test_a_request_is_one_trace_through_all_processes(traced: Traced) -> None:
    body, trace = completion(LONG_PROMPT, 1, 40), trace_of(0xA)
    answer = traced.complete(body, trace)
    assert answer.status == 200 and answer.path == "remote"
    spans = traced.tree(trace, "text_completion tiny", "route", "prefill", "decode", "transfer")
    root, prefill, decode, transfer = (spans[n] for n in ("text_completion tiny", "prefill", "decode", "transfer"))
    assert (root.parent, root.kind, root.error) == (CLIENT_SPAN, SERVER, None)
    assert {spans[name].parent for name in ("route", "prefill", "decode")} == {root.id} and transfer.parent == decode.id
    assert (prefill.kind, decode.kind, transfer.kind) == (SERVER, SERVER, CLIENT)
    span_sources = [(span.service, span.instance) for span in (prefill, decode, transfer)]
    assert span_sources == [("tandem-worker", "p"), ("tandem-worker", "d"), ("tandem-worker", "d")]
    assert root.service == spans["route"].service == "tandem-gateway"
    assert spans["route"].is_within(root) and prefill.is_within(root)
    assert decode.is_within(root) and transfer.is_within(decode)
    assert prefill.end - SKEW_S <= transfer.end and transfer.start < prefill.end, (
        "KV moves while the prompt is computed"
    )
    chunks = [event for event in prefill.events if event[1] == "chunk"]
    assert sum(event[2]["tandem.tokens"] for event in chunks) == LONG_PROMPT and len(chunks) > 20
    assert all(one[0] < other[0] for one, other in pairwise(chunks))
    assert prefill.start <= chunks[0][0] and chunks[-1][0] <= prefill.end
    assert root.attributes["gen_ai.usage.input_tokens"] == LONG_PROMPT
    assert root.attributes["gen_ai.usage.output_tokens"] == 40 and root.attributes["tandem.path"] == "remote"
    assert transfer.attributes["tandem.transfer.bytes"] > transfer.attributes["tandem.transfer.exposed_bytes"]


def test_the_ledger_in_the_root_adds_up_to_what_the_client_waited(traced: Traced) -> None:
    """The sum is within one percent, except for the time between the last byte and its reading."""
    shares = []
    for number in range(5):
        trace, began = trace_of(0xB0 + number), time.monotonic()
        traced.complete(completion(LONG_PROMPT, 10 + number, 300), trace)
        wall_s = time.monotonic() - began
        until(lambda trace=trace: any(s.parent == CLIENT_SPAN for s in traced.spans(trace)), "a root")  # type: ignore[misc]
        (root,) = [span for span in traced.spans(trace) if span.parent == CLIENT_SPAN]
        total_s = sum(root.attributes[f"tandem.stage.{stage}_s"] for stage in STAGES)
        assert total_s == pytest.approx(root.attributes["tandem.total_s"], abs=1e-6)
        assert total_s == pytest.approx(root.end - root.start, abs=1e-5)
        assert all(root.attributes[f"tandem.stage.{stage}_s"] > 0 for stage in ("prefill", "decode"))
        assert total_s < wall_s
        shares.append(total_s / wall_s)
        if shares[-1] > 0.99:
            return
    pytest.fail(f"the stages add up to {shares} of what the client waited")


def test_grpc_requests_are_traced_too(traced: Traced) -> None:
    trace = trace_of(0xC)
    with connected(traced.gateway) as stub:
        stub.Complete(grpc_completion(40, 30, 4), metadata=tuple(parent(trace).items()))
    spans = traced.tree(trace, "text_completion tiny", "route", "prefill", "decode", "transfer")
    assert spans["text_completion tiny"].parent == CLIENT_SPAN


def test_a_request_line_names_the_trace(traced: Traced) -> None:
    trace = trace_of(0xD)
    send(traced.gateway.url, completion(8, 40, 2), headers=parent(trace) | {"x-request-id": "line-1"})

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in traced.gateway.log.splitlines()]
        return [line for line in found if line.get("request_id") == "line-1"]

    until(lines, "a line of the request")
    (line,) = lines()
    assert (line["logger"], line["outcome"], line["trace_id"]) == ("tandem.requests", "finished", trace)
    assert (line["path"], line["workers"], line["prompt_tokens"], line["output_tokens"]) == ("remote", ["p", "d"], 8, 2)
    assert sum(line["stages"].values()) == pytest.approx(line["total_s"], abs=1e-4)


def test_a_client_that_is_not_sampled_has_no_spans(traced: Traced) -> None:
    """The jobs of the request at workers have none either; workers send spans before those of a later request."""
    assert traced.complete(completion(40, 50, 4), trace_of(0xE0), flags="00").status == 200
    assert traced.complete(completion(40, 51, 4), trace_of(0xE1)).status == 200
    traced.tree(trace_of(0xE1), "text_completion tiny", "route", "prefill", "decode", "transfer")
    assert traced.spans(trace_of(0xE0)) == []


def test_a_refused_or_cancelled_request_has_a_root_span_with_the_error(traced: Traced) -> None:
    assert traced.complete(completion(8, 60, 10**6), trace_of(0xF0)).status == 400
    refused = traced.tree(trace_of(0xF0), "text_completion tiny")["text_completion tiny"]
    assert refused.attributes["error.type"] == "context_length_exceeded" and refused.error
    body = completion(8, 61, LONG_ANSWER, stream=True)
    with Post(traced.gateway.url, body, headers=parent(trace_of(0xF1))) as post:
        post.wait_events(5)
    spans = traced.tree(trace_of(0xF1), "text_completion tiny", "route", "prefill", "decode", "transfer")
    assert spans["text_completion tiny"].attributes["error.type"] == "cancelled"
    assert spans["decode"].attributes["tandem.job.outcome"] == "cancelled"


def test_metrics_of_all_processes_arrive(traced: Traced) -> None:
    def metric_points(instance_of: str, name: str) -> list[Any]:
        found = [*traced.by_grpc.metrics, *traced.by_http.metrics]
        return [one for resource, one in found if one.name == name and resource["service.instance.id"] == instance_of]

    def tokens(instance: str) -> list[float]:
        points = [metric.sum.data_points for metric in metric_points(instance, "tandem.generated_tokens")]
        return [sum(point.as_double or point.as_int for point in each) for each in points]

    traced.complete(completion(40, 70, 8), trace_of(0x10))
    gateways = {resource["service.instance.id"] for resource, _ in traced.by_grpc.metrics}
    assert len(gateways) == 1
    (gateway,) = gateways
    num_generated = {name: tokens(name)[-1] for name in ("p", "d")}
    traced.complete(completion(40, 71, 8), trace_of(0x11))
    until(lambda: tokens("d")[-1] >= num_generated["d"] + 7, "the decode worker's tokens")
    until(lambda: tokens("p")[-1] > num_generated["p"], "the prefill worker's token")
    until(lambda: metric_points(gateway, "gen_ai.server.time_to_first_token"), "what clients see")
    last = metric_points("d", "tandem.generated_tokens")[-1]
    assert last.unit == "{token}" and last.sum.is_monotonic
    assert last.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert all(one <= other for one, other in pairwise(tokens("d")))
    first = metric_points(gateway, "gen_ai.server.time_to_first_token")[-1]
    (point,) = first.histogram.data_points
    assert first.unit == "s" and point.count == sum(point.bucket_counts) > 0
    assert attributes(point.attributes)["gen_ai.request.model"] == "tiny"
    assert metric_points("p", "tandem.step.duration") and metric_points("p", "tandem.kv.blocks")
    assert all(metric_points(each, "process.cpu.time") for each in ("p", "d", gateway))


@pytest.mark.nightly
def test_receivers_that_hang_or_are_gone_harm_no_request(traced: Traced) -> None:
    with pushing(**PUSHED, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1"):
        alone = traced.cluster.gateway("alone")
    alone.wait_serving()
    receivers = (traced.by_grpc, traced.by_http)
    for receiver in receivers:
        receiver.is_open.clear()
    before = [receiver.num_calls for receiver in receivers]
    try:
        until(lambda: all(r.num_calls > n for r, n in zip(receivers, before, strict=True)), "calls")
        for url in (traced.gateway.url, alone.url):
            for number in range(5):
                answer = send(url, completion(40, 80 + number, 8))
                assert answer.status == 200 and answer.error() is None
    finally:
        for receiver in receivers:
            receiver.is_open.set()
    assert alone.stop() == 0


@pytest.mark.nightly
def test_a_worker_that_is_killed_leaves_one_trace_with_both_attempts(traced: Traced) -> None:
    trace, body = trace_of(0x12), completion(40, 90, 600, stream=True)
    with Post(traced.gateway.url, body, headers=parent(trace)) as post:
        post.wait_events(10)
        traced.decode.kill()
        answer = post.finish()
    assert answer.error() is None and answer.about()["attempts"] == 2
    until(lambda: any(span.parent == CLIENT_SPAN for span in traced.spans(trace)), "a root")
    (root,) = [span for span in traced.spans(trace) if span.parent == CLIENT_SPAN]
    assert root.attributes["tandem.attempts"] == 2 and root.error is None
    until(lambda: any(span.attributes.get("tandem.attempt") == 2 for span in traced.spans(trace)), "a second attempt")
    of_workers = [span for span in traced.spans(trace) if span.service == "tandem-worker"]
    assert {span.parent for span in of_workers} == {root.id}, "one tree"
    assert {(span.instance, span.attributes["tandem.attempt"]) for span in of_workers} == {("p", 1), ("p", 2)}
    assert -(traced.decode.exit_code or 0) == signal.SIGKILL
