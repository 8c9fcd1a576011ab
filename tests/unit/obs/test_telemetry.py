"""Test what a process exports, with a real OTLP receiver whose address is in OTEL_ variables."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator

import pytest
from opentelemetry.context import Context
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE
from opentelemetry.trace import set_span_in_context

from tandem.obs import exporters
from tandem.obs.metrics.instruments import INTER_TOKEN_LATENCY, OUTPUT_TOKENS, READY, REQUEST_DURATION, RETRIES
from tandem.obs.telemetry import Telemetry
from tandem.obs.tracing import OFF, begin_trace, end_span, nanoseconds
from tests.otlp import OtlpReceiver, attributes, otlp_receiver
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("every_thread_ends")
BOTH = pytest.mark.parametrize("receiver", ["grpc", "http/protobuf"], indirect=True)


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def send_to(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", receiver.protocol)


@pytest.fixture
def receiver(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nothing_is_set: None
) -> Iterator[OtlpReceiver]:
    """Yield a receiver, of OTLP over HTTP unless a test says otherwise, to which the variables send everything."""
    with otlp_receiver(getattr(request, "param", "http/protobuf")) as opened:
        send_to(opened, monkeypatch)
        yield opened


def started() -> Telemetry:
    return Telemetry.start("tandem-gateway", "gateway-1", 10)


def a_request(telemetry: Telemetry) -> str:
    """Record one request and return its trace id."""
    trace = begin_trace(telemetry.tracer, "chat m", 100.0, "", "")
    trace.span.add_event("chunk", {"tokens": 3}, nanoseconds(100.5))
    context = set_span_in_context(trace.span, Context())
    attributes = {"tandem.lane": "batch"}
    end_span(telemetry.tracer.start_span("queue", context, attributes=attributes, start_time=nanoseconds(100.0)), 101.0)
    end_span(trace.span, 102.0, "x")
    return trace.id


@BOTH
def test_spans_arrive(receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = started()
    trace_id = a_request(telemetry)
    telemetry.close(30.0)
    telemetry.close(30.0)
    chat, queue = receiver.span("chat m"), receiver.span("queue")
    assert chat.trace_id.hex() == queue.trace_id.hex() == trace_id
    assert queue.parent_span_id == chat.span_id
    assert attributes(queue.attributes) == {"tandem.lane": "batch"}
    assert attributes(chat.events[0].attributes) == {"tokens": 3}
    resource, _ = receiver.spans[0]
    assert (resource["service.name"], resource["service.instance.id"]) == ("tandem-gateway", "gateway-1")
    assert caplog.records == []


@BOTH
def test_metrics_arrive(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    telemetry = started()
    telemetry.metrics.counter(OUTPUT_TOKENS).add(7, "local", "acme")
    telemetry.metrics.watch(READY, lambda: {(): 1})
    lag = telemetry.metrics.histogram(INTER_TOKEN_LATENCY)
    lag.of("batch", "m").record_traced(0.011, "ab" * 16, 5.0)
    lag.of("batch", "m").record(9.0)
    receiver.wait(lambda it: len([1 for _, metric in it.metrics if metric.name == "tandem.ready"]) >= 2)
    telemetry.metrics.counter(RETRIES).add(1)
    telemetry.close(30.0)
    assert receiver.metric("tandem.request.retries").sum.data_points[0].as_int == 1, "the last message says all"
    resource, _ = receiver.metrics[0]
    assert resource["service.name"] == "tandem-gateway"
    tokens = receiver.metric("tandem.output_tokens")
    assert tokens.unit == "{token}" and tokens.description == OUTPUT_TOKENS.description
    assert tokens.sum.is_monotonic and tokens.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = tokens.sum.data_points
    assert attributes(point.attributes) == {"path": "local", "tenant": "acme"} and point.as_int == 7
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano
    assert receiver.metric("tandem.ready").gauge.data_points[0].as_int == 1
    (seen,) = receiver.metric("tandem.inter_token_latency").histogram.data_points
    assert list(seen.explicit_bounds) == list(INTER_TOKEN_LATENCY.bounds)
    place = bisect_left(INTER_TOKEN_LATENCY.bounds, 0.011)
    assert [seen.bucket_counts[place], seen.bucket_counts[-1], sum(seen.bucket_counts)] == [1, 1, 2]
    assert (seen.count, seen.sum) == (2, 9.011) and not seen.HasField("min") and not seen.HasField("max")
    (exemplar,) = seen.exemplars
    assert (exemplar.trace_id.hex(), exemplar.as_double, exemplar.time_unix_nano) == ("ab" * 16, 0.011, 5 * 10**9)


@pytest.mark.parametrize("receiver", ["grpc", pytest.param("http/protobuf", marks=pytest.mark.slow)], indirect=True)
def test_any_number_of_series_arrives(receiver: OtlpReceiver) -> None:
    """The series need more bytes than a gRPC server accepts in one message."""
    names = {f"{'tenant' * 20}-{number}" for number in range(3 * exporters.MAX_BATCH + 1)}
    telemetry = Telemetry.start("tandem-gateway", "gateway-1", len(names))
    lasted = telemetry.metrics.histogram(REQUEST_DURATION)
    for name in names:
        lasted.of("chat", "m" * 200, name, "interactive", "").record(0.1)
    telemetry.close(30.0)
    histograms = [metric.histogram for _, metric in receiver.metrics if metric.name == REQUEST_DURATION.name]
    assert sum(each.ByteSize() for each in histograms) > 4 * 2**20
    points = [attributes(point.attributes)["tenant"] for each in histograms for point in each.data_points]
    assert len(points) == len(names) and set(points) == names


def test_nothing_is_sent_unless_a_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = threading.active_count()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", " ")
    telemetry = started()
    assert a_request(telemetry) == "" and telemetry.tracer is OFF
    assert threading.active_count() == num_threads
    telemetry.close(0.0)


def test_one_signal_can_be_sent_alone(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    telemetry = started()
    telemetry.metrics.counter(RETRIES).add(1)
    assert a_request(telemetry) == ""
    telemetry.close(30.0)
    assert receiver.metrics and not receiver.spans


def test_the_sdk_can_be_disabled(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = started()
    telemetry.metrics.counter(RETRIES).add(1)
    a_request(telemetry)
    telemetry.close(30.0)
    assert receiver.num_calls == 0
    assert b"tandem_request_retries_total 1.0\n" in telemetry.exposition("")[1], "what is asked for is still told"


@BOTH
def test_the_standard_variables_are_honoured(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=blue,deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "2")
    telemetry = started()
    telemetry.metrics.counter(RETRIES).add(1)
    a_request(telemetry)
    telemetry.close(30.0)
    for resource in (receiver.spans[0][0], receiver.metrics[0][0]):
        assert resource["service.name"] == "mine" and resource["service.instance.id"] == "blue"
        assert resource["deployment.environment.name"] == "test"
    assert receiver.headers["api-key"] == "s3cret"
    assert attributes(receiver.span("queue").attributes) == {"tandem.lane": "ba"}


def test_a_sampler_takes_its_part(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    telemetry = started()
    sent = {a_request(telemetry) for _ in range(64)} - {""}
    telemetry.close(30.0)
    assert 0 < len(sent) < 64
    assert {span.trace_id.hex() for _, span in receiver.spans} == sent


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_receiver_that_is_down_costs_nobody_anything(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    telemetry = started()
    for logger in map(logging.getLogger, exporters.NOISY_EXPORTERS):
        logger.filters.clear()  # the messages of other tests count
    telemetry.metrics.counter(RETRIES).add(1)
    for _ in range(20):
        a_request(telemetry)
    telemetry.close(30.0)
    assert {record.name for record in caplog.records if record.levelname == "ERROR"} & set(exporters.NOISY_EXPORTERS)


@pytest.mark.slow
def test_spans_arrive_by_a_new_channel_once_the_receiver_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    send_to(OtlpReceiver("grpc", f"http://127.0.0.1:{port}"), monkeypatch)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    for logger in map(logging.getLogger, exporters.NOISY_EXPORTERS):
        logger.filters.clear()  # the messages of other tests count
    telemetry = started()
    a_request(telemetry)
    closing = threading.Thread(target=telemetry.close, args=(30.0,))
    closing.start()
    while not {record.name for record in caplog.records} & set(exporters.NOISY_EXPORTERS):
        assert closing.is_alive(), "it went, or failed, and nobody was told"
        time.sleep(0.01)
    with otlp_receiver("grpc", port=port) as receiver:
        closing.join()
        assert {span.name for _, span in receiver.spans} == {"chat m", "queue"}


def test_a_failure_is_logged_once_a_minute_for_each_thread() -> None:
    def passes(at: float, msg: str, thread: str) -> bool:
        record = logging.makeLogRecord({"name": "x", "msg": msg, "created": at, "threadName": thread})
        return sparingly.filter(record)

    sparingly = exporters.RateLimitFilter()
    assert passes(100.0, "failed %s", "a") and passes(101.0, "failed %s", "b") and passes(102.0, "other", "a")
    assert (
        not passes(159.0, "failed %s", "a") and passes(160.0, "failed %s", "a") and not passes(161.0, "failed %s", "a")
    )


@BOTH
def test_a_receiver_that_hangs_costs_nobody_anything(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver's calls end only with the test, so code that waited for one would hang."""
    receiver.is_open.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_TIMEOUT", "600000")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    telemetry = started()
    telemetry.metrics.counter(RETRIES).add(1)
    a_request(telemetry)
    receiver.wait(lambda it: it.num_calls >= 2)
    for _ in range(20):
        a_request(telemetry)
    telemetry.close(0.1)
    left = {each.name: each for each in threading.enumerate() if each.name.startswith("telemetry")}
    if receiver.protocol == "grpc":  # its calls can be ended
        for thread in left.values():
            thread.join(30.0)
            assert not thread.is_alive(), thread
    else:
        assert "telemetry-spans" in left, "close waited for it"
    assert "spans could not be sent" in caplog.text and "metrics could not be sent" in caplog.text
    assert telemetry.exposition("")[1]


def test_exporters_log_sparingly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    telemetry = started()
    telemetry.close(0.0)
    for logger in map(logging.getLogger, exporters.NOISY_EXPORTERS):
        assert [each for each in logger.filters if isinstance(each, exporters.RateLimitFilter)], logger


def test_what_waits_is_bounded(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.is_open.clear()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    telemetry = started()
    for _ in range(100):
        a_request(telemetry)
    receiver.wait(lambda it: it.num_calls == 1)
    for _ in range(100):
        a_request(telemetry)
    receiver.is_open.set()
    telemetry.close(30.0)
    assert len(receiver.spans) == 8
    assert b"tandem_span_dropped_total 392.0\n" in telemetry.exposition("")[1], "two of each request, less those"


def test_a_figure_that_cannot_be_read_is_logged_and_the_next_ones_are_sent(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed = threading.Event()

    def read() -> dict[tuple[str, ...], float]:
        if has_failed.is_set():
            return {(): 1}
        has_failed.set()
        raise RuntimeError("the owner is gone")

    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    telemetry = started()
    telemetry.metrics.watch(READY, read)
    receiver.wait(lambda it: any(metric.name == "tandem.ready" for _, metric in it.metrics))
    telemetry.close(30.0)
    assert "metrics could not be sent" in caplog.text and "the owner is gone" in caplog.text


@pytest.mark.slow
def test_figures_can_go_to_the_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code = "from tests.unit.obs.test_telemetry import *; t = started(); a_request(t); "
    code += "t.metrics.counter(RETRIES).add(1); t.close(30.0)"
    variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "console,prometheus"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True, timeout=60)
    output = capfd.readouterr().out
    assert '"name": "chat m"' in output and '"name": "tandem.request.retries"' in output


def test_a_program_that_sends_nothing_does_not_load_what_sends() -> None:
    code = "import sys, tandem.obs.telemetry as t; t.Telemetry.start('a', 'b', 1).exposition(''); "
    code += "print(*[name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == []
