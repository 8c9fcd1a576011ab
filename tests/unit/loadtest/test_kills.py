"""Test how the pause after a killed worker is divided, and that spans reach the receiver."""

from __future__ import annotations

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from loadtest.cluster.kills import Pause, pause_of, report
from loadtest.processes.spans import TimedSpan, span_receiver

FIRST_WAITS = [TimedSpan("queue", 1.0, 1.5), TimedSpan("route", 1.5, 2.0)]


def test_a_stream_pauses_from_its_last_token_before_the_kill() -> None:
    """Another gap may be longer."""
    stamps = [3.0, 3.5, 4.0, 9.0, 9.5, 99.0]
    waits = [*FIRST_WAITS, TimedSpan("queue", 5.0, 6.0), TimedSpan("route", 6.0, 7.0)]
    assert pause_of(stamps, waits, 4.5, is_decoding=True) == Pause(5.0, 0.5, 2.0, 2.0)


def test_a_request_without_a_token_waits_from_the_kill_on() -> None:
    waits = [*FIRST_WAITS, TimedSpan("route", 5.0, 6.0), TimedSpan("queue", 30.0, 31.0)]
    assert pause_of([9.0, 9.5], waits, 4.5, is_decoding=False) == Pause(4.5, 0.5, 1.0, 3.0)


def test_there_is_no_pause_before_the_trace_of_the_new_attempt() -> None:
    assert pause_of([3.0, 9.0], FIRST_WAITS, 4.5, is_decoding=True) is None


def test_the_report_pools_the_requests_of_all_kills_and_compares_both_sides() -> None:
    before, after = Pause(4.0, 2.0, 1.0, 1.0), Pause(1.0, 0.25, 0.25, 0.5)
    lines = report({("decode", "before"): [[before], [before, before]], ("decode", "after"): [[after], []]})
    assert "| decode, before | 2 | 3 | 4,000 | 4,000 | 2,000 |" in lines
    assert "| decode, after | 2 | 1 | 1,000 | 1,000 | 250 |" in lines
    assert "decode: pause after / before, p50 / p99: 0.25 / 0.25" in lines


def test_spans_are_kept_by_trace() -> None:
    request = trace_service_pb2.ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.name = bytes(15) + b"\x07", "queue"
    span.start_time_unix_nano, span.end_time_unix_nano = 10**9, 3 * 10**9
    with span_receiver() as receiver:
        address = receiver.environment["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://")
        with grpc.insecure_channel(address) as channel:
            trace_service_pb2_grpc.TraceServiceStub(channel).Export(request, timeout=20.0)
        assert receiver.spans(f"{7:032x}") == [TimedSpan("queue", 1.0, 3.0)]
        assert receiver.spans(f"{8:032x}") == []
