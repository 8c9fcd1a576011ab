"""Test that spans are encoded for OTLP exactly as the SDK's encoder does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_by_sdk
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from tandem.obs.otel_settings import TraceSampling
from tandem.obs.tracing.otlp_spans import SpanEncoder
from tandem.obs.tracing.readable_spans import readable
from tandem.obs.tracing.span_attributes import LayeredAttributes, Shared
from tandem.obs.tracing.span_limits import SpanLimitSettings
from tandem.obs.tracing.span_maker import SpanMaker
from tandem.obs.tracing.tracing import EndedSpan, SpanEvent, SpanRecord, Tracing

RESOURCE = Resource({"service.name": "tandem-gateway", "process.pid": 7, "tags": ("a", "b")}, "https://schema")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = (
    TEXTS
    | st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.lists(TEXTS, max_size=3).map(tuple)
)
ATTRIBUTES = st.dictionaries(TEXTS, VALUES, max_size=5)
TIMES = st.floats(0, 2**33)
NAMES = st.lists(TEXTS, max_size=6, unique=True)


@st.composite
def layers(draw: st.DrawFn) -> LayeredAttributes:
    """Generate attributes in layers; no name occurs twice."""
    names = draw(NAMES)
    first, last = sorted((draw(st.integers(0, len(names))), draw(st.integers(0, len(names)))))
    shared, own = ({name: draw(VALUES) for name in some} for some in (names[:first], names[first:last]))
    figures = [draw(st.floats(allow_nan=False)) for _ in names[last:]]
    return LayeredAttributes(Shared(shared), own, tuple(names[last:]), figures)


EVENTS = st.lists(st.builds(SpanEvent, TEXTS, TIMES, ATTRIBUTES), max_size=3).map(tuple)


def records(inside: st.SearchStrategy[tuple[SpanRecord, ...]]) -> st.SearchStrategy[SpanRecord]:
    return st.builds(
        SpanRecord,
        name=TEXTS,
        start=TIMES,
        end=TIMES,
        attributes=ATTRIBUTES | layers(),
        events=EVENTS,
        children=inside,
        error=TEXTS,
        kind=st.sampled_from(["internal", "server", "client"]),
    )


SPANS = st.recursive(st.just(()), lambda inside: st.lists(records(inside), max_size=3).map(tuple), max_leaves=5)
HEADERS = st.sampled_from([("", ""), *((f"00-{'ab' * 16}-{'cd' * 8}-{flags}", "b=1,a=2") for flags in ("01", "03"))])


def ended(records_to_end: Sequence[SpanRecord], *headers: str) -> list[EndedSpan]:
    """Return `records_to_end` as ended spans, each in a trace of its own or all in the trace of `headers`."""
    made: list[EndedSpan] = []
    tracing = Tracing(SpanMaker(TraceSampling(), made.append))
    for span in records_to_end:
        tracing.begin(*headers or ("", "")).end(span)
    return made


def by_sdk(spans: Sequence[EndedSpan]) -> ExportTraceServiceRequest:
    limits = SpanLimitSettings()
    request: ExportTraceServiceRequest = encode_by_sdk([readable(span, RESOURCE, limits) for span in spans])
    return request


def encoded(spans: Sequence[EndedSpan]) -> ExportTraceServiceRequest:
    encoder = SpanEncoder(RESOURCE)
    parts = [part for part in map(encoder.encode, spans) if part is not None]
    request: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(encoder.request(parts))
    return request


@pytest.mark.slow
@given(SPANS.filter(bool), HEADERS)
def test_spans_are_encoded_as_the_sdk_does(roots: tuple[SpanRecord, ...], headers: tuple[str, str]) -> None:
    made = ended(roots, *headers)
    assert encoded(made) == by_sdk(made)


@pytest.mark.parametrize("length", [16, 17, 100, 127, 128, 4000, 20_000])
def test_lengths_of_more_than_a_byte_are_encoded_as_the_sdk_does(length: int) -> None:
    text = "ä" * length
    made = ended([SpanRecord(name=text, start=1.0, end=2.0, attributes={text: 1, "b": text, "c": "x"}, error=text)])
    assert encoded(made) == by_sdk(made)


@pytest.mark.parametrize("values", [(1, True, 1.0), (0.0, -0.0, 0, False), ("1", 1), (("a",), "a", ("a", "b"))])
def test_values_of_different_types_that_compare_equal_stay_different(values: tuple[Any, ...]) -> None:
    spans = [SpanRecord(name="x", start=1.0, end=2.0, attributes={"said": value}) for value in (*values, *values)]
    made = ended(spans)
    request = encoded(made)
    assert request.SerializeToString(deterministic=True) == by_sdk(made).SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "wide",
    [{"a": 1, "b": 2, "c": 3}, LayeredAttributes(Shared({"a": 1}), {"b": 2}, ("c",), [3.0])],
    ids=["plain", "layers"],
)
def test_dropped_counts_equal_the_sdk_s(monkeypatch: pytest.MonkeyPatch, wide: Any) -> None:
    for name in ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT"):
        monkeypatch.setenv(name, "1")
    events = tuple(SpanEvent("e", 1.0, wide) for _ in range(4))
    span = SpanRecord(name="x", start=1.0, end=2.0, attributes=wide, events=events)
    made = ended([span])
    request = encoded(made)
    (one,) = request.resource_spans[0].scope_spans[0].spans
    dropped = (one.dropped_attributes_count, one.dropped_events_count, one.events[0].dropped_attributes_count)
    assert dropped == (2, 3, 2) and request == by_sdk(made)


@pytest.mark.parametrize("wrong", [{"said": 2**63}, {"said": "\ud800"}, {"said": None}, {3: "x"}, {3: "x" * 99}])
def test_a_span_without_a_form_is_left_out_alone(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    cases = [("a", {"said": "x"}), ("b", wrong), ("c", {"said": "z"})]
    made = ended([SpanRecord(name=name, start=1.0, end=2.0, attributes=attributes) for name, attributes in cases])
    (scope,) = encoded(made).resource_spans[0].scope_spans
    assert [span.name for span in scope.spans] == ["a", "c"]
    assert [record.message for record in caplog.records] == ["telemetry: the span 'b' cannot be sent"]


def test_what_spans_share_is_encoded_once() -> None:
    shared = Shared({"model": "m"})
    alike = [SpanRecord("x", 1.0, 2.0, LayeredAttributes(shared, {"at": at}, (), ())) for at in range(3)]
    made = ended(alike)
    assert encoded(made) == by_sdk(made) and shared.encoded
    shared.values = {}
    (scope,) = encoded(ended(alike)).resource_spans[0].scope_spans
    assert [[each.key for each in span.attributes] for span in scope.spans] == [["model", "at"]] * 3


@pytest.mark.parametrize("start", [math.nan, math.inf, -1.0])
def test_a_span_of_no_time_takes_no_other_along(start: float) -> None:
    times = [start, 1.0, start, 1.5, start]
    made = ended([SpanRecord(name=f"s{at}", start=at, end=2.0, attributes={}) for at in times])
    (scope,) = encoded(made).resource_spans[0].scope_spans
    assert [span.name for span in scope.spans] == ["s1.0", "s1.5"]
