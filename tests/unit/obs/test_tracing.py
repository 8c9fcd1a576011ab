"""Test how traces are begun, joined and passed on with OpenTelemetry's tracer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context

from tandem.obs.tracing import OFF, begin_trace, end_span, nanoseconds, remote_parent
from tests.unit.obs.traced import Traced

CLIENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
UNSAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-00"


def test_a_request_is_one_tree_across_processes() -> None:
    gateway, worker = Traced(), Traced()
    trace = begin_trace(gateway.tracer, "chat", 100.0, CLIENT, "vendor=1")
    decode = worker.tracer.start_span("decode", remote_parent(trace.traceparent))
    end_span(worker.tracer.start_span("transfer", set_span_in_context(decode, Context())), 102.5)
    end_span(decode, 103.0, "the worker was lost")
    end_span(trace.span, 104.0)
    inside = set_span_in_context(trace.span, Context())
    end_span(gateway.tracer.start_span("queue", inside, start_time=nanoseconds(100.5)), 101.0)
    chat, queue = gateway.by_name()["chat"], gateway.by_name()["queue"]
    decoded, transfer = worker.by_name()["decode"], worker.by_name()["transfer"]
    assert chat.parent and queue.parent and decoded.parent and transfer.parent and chat.context and decoded.context
    assert chat.parent.span_id == int("cd" * 8, 16)
    assert queue.parent.span_id == decoded.parent.span_id == chat.context.span_id
    assert transfer.parent.span_id == decoded.context.span_id
    every = [*gateway.spans(), *worker.spans()]
    assert {span.context.trace_id for span in every if span.context} == {int("ab" * 16, 16)} == {int(trace.id, 16)}
    assert chat.context.trace_state.to_header() == "vendor=1"
    assert chat.kind is SpanKind.SERVER and queue.kind is SpanKind.INTERNAL
    assert (chat.start_time, chat.end_time) == (100 * 10**9, 104 * 10**9)
    assert (queue.start_time, queue.end_time) == (100_500 * 10**6, 101 * 10**9)
    assert decoded.status.status_code is StatusCode.ERROR and decoded.status.description == "the worker was lost"
    assert chat.status.status_code is StatusCode.UNSET


def test_without_a_parent_a_request_is_a_trace_of_its_own() -> None:
    traced = Traced()
    first, second = (begin_trace(traced.tracer, "chat", 1.0, "", "") for _ in range(2))
    assert len(first.id) == 32 and first.id != second.id
    context = get_current_span(remote_parent(first.traceparent)).get_span_context()
    assert context.trace_flags.sampled and f"{context.trace_id:032x}" == first.id
    end_span(first.span, 2.0)
    assert traced.by_name()["chat"].parent is None


@pytest.mark.parametrize(
    ("tracer", "header"),
    [
        (lambda: OFF, CLIENT),
        (lambda: Traced(ALWAYS_OFF).tracer, CLIENT),
        (lambda: Traced().tracer, UNSAMPLED),
    ],
    ids=["off", "always-off", "the-client-does-not"],
)
def test_an_unsampled_request_passes_its_header_on(tracer: Callable[[], Tracer], header: str) -> None:
    trace = begin_trace(tracer(), "chat", 1.0, header, "")
    assert (trace.traceparent, trace.id, trace.span.is_recording()) == (header, "", False)


@pytest.mark.parametrize("header", ["", "garbage", CLIENT + "x", CLIENT.upper(), CLIENT.replace("00-", "ff-")])
def test_what_is_no_header_is_not_passed_on(header: str) -> None:
    for tracer in (OFF, Traced(ALWAYS_OFF).tracer):
        assert begin_trace(tracer, "chat", 1.0, header, "").traceparent == ""
    trace = begin_trace(Traced().tracer, "chat", 1.0, header, "")
    assert trace.traceparent and trace.id != "ab" * 16


@pytest.mark.parametrize(("header", "flags"), [("", "03"), (CLIENT, "01"), (CLIENT[:-2] + "03", "03")])
def test_whether_a_trace_s_id_is_random_is_passed_on(header: str, flags: str) -> None:
    assert begin_trace(Traced().tracer, "chat", 1.0, header, "").traceparent.endswith(f"-{flags}")


def test_a_span_keeps_to_opentelemetry_s_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "3"),
        ("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "1"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4"),
    ):
        monkeypatch.setenv(name, limit)
    traced = Traced()
    trace = begin_trace(traced.tracer, "x", 1.0, CLIENT, "")
    trace.span.set_attributes({"a": "longer", "b": "longer", "c": "x"})
    for number in range(5):
        trace.span.add_event(f"e{number}", {"a": "longer", "b": 1}, number)
    end_span(trace.span, 2.0)
    (span,) = traced.spans()
    assert dict(span.attributes or {}) == {"b": "long", "c": "x"} and span.dropped_attributes == 1
    assert [event.name for event in span.events] == ["e2", "e3", "e4"] and span.dropped_events == 2
    assert [dict(event.attributes or {}) for event in span.events] == [{"b": 1}] * 3


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{31,33}-[0-9a-f]{15,17}-[0-9a-f]{2}.?"), st.text())
def test_no_header_is_too_strange(traceparent: str, tracestate: str) -> None:
    for tracer in (OFF, NEVER, TRACED.tracer):
        trace = begin_trace(tracer, "chat", 1.0, traceparent, tracestate)
        assert trace.span.is_recording() or trace.traceparent in (traceparent, "")


TRACED, NEVER = Traced(), Traced(ALWAYS_OFF).tracer


def test_what_clients_send_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    for traceparent in (CLIENT, "x" * 600):
        for tracestate in ("a", "a=1,a=2", "x" * 600, ",".join(f"k{i}=v" for i in range(33)), "a=\x00"):
            begin_trace(TRACED.tracer, "chat", 1.0, traceparent, tracestate)
    assert caplog.records == []
