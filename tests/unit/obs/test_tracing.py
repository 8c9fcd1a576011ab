"""Test spans: one tree for each request across processes, and none for unsampled requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision, _get_from_env_or_default
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from tandem.obs.otel_settings import TraceSampling, read_otel
from tandem.obs.tracing.readable_spans import readable
from tandem.obs.tracing.span_limits import SpanLimitSettings
from tandem.obs.tracing.span_maker import SpanMaker
from tandem.obs.tracing.trace_context import format_traceparent, parse_traceparent, parse_tracestate
from tandem.obs.tracing.tracing import OFF, EndedSpan, SpanEvent, SpanRecord, Tracing

CLIENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
USUAL = TraceSampling()
UNSAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-00"


class Traced:
    """Tracing of one process with the spans that it made."""

    def __init__(self, sampling: TraceSampling = USUAL) -> None:
        self.made: list[ReadableSpan] = []
        self.tracing = Tracing(SpanMaker(sampling, self._ended))
        self._limits = SpanLimitSettings()

    def _ended(self, span: EndedSpan) -> None:
        self.made.append(readable(span, Resource({}), self._limits))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.made}


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def a_span(name: str, start: float, end: float, *children: SpanRecord) -> SpanRecord:
    return SpanRecord(name=name, start=start, end=end, attributes={}, children=children)


def test_a_request_is_one_tree_across_processes() -> None:
    gateway, worker = Traced(), Traced()
    trace = gateway.tracing.begin(CLIENT, "vendor=1")
    assert worker.tracing.would_record(trace.traceparent)
    worker.tracing.record(trace.traceparent, a_span("decode", 102.0, 103.0, a_span("transfer", 102.0, 102.5)))
    queue = a_span("queue", 100.5, 101.0)
    trace.end(SpanRecord(name="chat", start=100.0, end=104.0, attributes={}, children=(queue,), kind="server"))
    chat, queued = gateway.spans["chat"], gateway.spans["queue"]
    decode, transfer = worker.spans["decode"], worker.spans["transfer"]
    assert parent_id(chat) == int("cd" * 8, 16)
    assert parent_id(queued) == parent_id(decode) == span_id(chat)
    assert parent_id(transfer) == span_id(decode)
    every = [*gateway.spans.values(), *worker.spans.values()]
    assert len(every) == 4 and len({span_id(span) for span in every}) == 4
    assert {span.context.trace_id for span in every if span.context} == {int("ab" * 16, 16)} == {int(trace.id, 16)}
    assert chat.context and chat.context.trace_state.to_header() == "vendor=1"
    assert chat.kind is SpanKind.SERVER and queued.kind is SpanKind.INTERNAL
    assert (chat.start_time, chat.end_time) == (100 * 10**9, 104 * 10**9)
    assert (transfer.start_time, transfer.end_time) == (102 * 10**9, 102_500 * 10**6)


def test_a_span_has_all_that_its_record_holds() -> None:
    traced = Traced()
    chunk = SpanEvent("chunk", 1.5, {"tokens": 64, "seconds": 0.25})
    record = SpanRecord(
        name="prefill",
        start=1.0,
        end=2.0,
        attributes={"tandem.worker": "p-1", "tandem.cached_tokens": 3, "share": 0.5, "is_last": True},
        events=(chunk,),
        error="the worker was lost",
        kind="server",
    )
    traced.tracing.record(CLIENT, record)
    span = traced.spans["prefill"]
    assert dict(span.attributes or {}) == record.attributes
    assert [(event.name, event.timestamp, dict(event.attributes or {})) for event in span.events] == [
        ("chunk", 1_500_000_000, chunk.attributes)
    ]
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "the worker was lost"
    assert span.kind is SpanKind.SERVER


def test_without_a_parent_a_request_is_a_trace_of_its_own() -> None:
    traced = Traced()
    first, second = traced.tracing.begin("", ""), traced.tracing.begin("", "")
    assert first.is_sampled and len(first.id) == 32 and first.id != second.id
    context = parse_traceparent(first.traceparent)
    assert context is not None and context.is_sampled and context.trace == first.id
    first.end(a_span("chat", 1.0, 2.0))
    assert traced.spans["chat"].parent is None


@pytest.mark.parametrize(
    ("tracing", "header"),
    [
        (lambda: OFF, CLIENT),
        (lambda: Traced(TraceSampling(0.0, is_parent_based=False)).tracing, CLIENT),
        (lambda: Traced(TraceSampling(0.0, is_parent_based=False)).tracing, CLIENT),
        (lambda: Traced().tracing, UNSAMPLED),
    ],
    ids=["off", "always-off", "none-of-them", "the-client-does-not"],
)
def test_an_unsampled_request_passes_its_header_on(tracing: Callable[[], Tracing], header: str) -> None:
    trace = tracing().begin(header, "")
    assert (trace.traceparent, trace.id, trace.is_sampled) == (header, "", False)
    trace.end(a_span("chat", 1.0, 2.0))


@pytest.mark.parametrize("header", ["", "garbage", CLIENT + "x", CLIENT.upper()])
def test_what_is_no_header_is_not_passed_on(header: str) -> None:
    for tracing in (OFF, Traced(TraceSampling(0.0, is_parent_based=False)).tracing):
        assert tracing.begin(header, "").traceparent == ""
    trace = Traced().tracing.begin(header, "")
    assert parse_traceparent(trace.traceparent) and trace.id != "ab" * 16


@pytest.mark.parametrize(("header", "flags"), [("", "03"), (CLIENT, "01"), (CLIENT[:-2] + "03", "03")])
def test_whether_a_trace_s_id_is_random_is_passed_on(header: str, flags: str) -> None:
    assert Traced().tracing.begin(header, "").traceparent.endswith(f"-{flags}")


def test_no_span_is_made_for_an_unsampled_request() -> None:
    traced = Traced(TraceSampling(0.0, is_parent_based=False))
    traced.tracing.begin("", "").end(a_span("chat", 1.0, 2.0))
    assert traced.spans == {}
    sampling = Traced()
    for parent in ("", "garbage", UNSAMPLED):
        assert not sampling.tracing.would_record(parent)
        sampling.tracing.record(parent, a_span("decode", 1.0, 2.0))
    assert sampling.spans == {}
    always = Traced(TraceSampling(is_parent_based=False))
    always.tracing.record(UNSAMPLED, a_span("decode", 1.0, 2.0))
    assert always.spans == {}, "its trace would lack the parent"
    assert not OFF.would_record(CLIENT)
    OFF.record(CLIENT, a_span("decode", 1.0, 2.0))


SAMPLERS = [
    {},
    *(
        {"OTEL_TRACES_SAMPLER": f"{based}{own}", "OTEL_TRACES_SAMPLER_ARG": "0.4"}
        for based in ("", "parentbased_", "ParentBased_")
        for own in ("always_on", "always_off", "traceidratio")
    ),
]
IDS = st.integers(1, 2**128 - 1)
PARENTS = st.none() | st.builds(
    SpanContext,
    IDS,
    st.integers(1, 2**64 - 1),
    st.just(value=True),
    st.integers(0, 3).map(TraceFlags),
    st.just(TraceState([("vendor", "1")])),
)


@given(st.sampled_from(SAMPLERS), PARENTS, IDS)
def test_it_is_sampled_as_the_sdk_does(variables: dict[str, str], parent: SpanContext | None, trace: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        sampler = _get_from_env_or_default()
    sampling = read_otel(variables | {"OTEL_TRACES_EXPORTER": "otlp"}).sampling
    maker = SpanMaker(sampling, [].append, lambda num_bytes: random_bytes[-num_bytes:])
    random_bytes = trace.to_bytes(16, "big") + b"\7" * 8
    trace = trace if parent is None else parent.trace_id
    context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
    decided = sampler.should_sample(context, trace, "request")
    header = None if parent is None else f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{parent.trace_flags:02x}"
    made = maker.sample(None if header is None else parse_traceparent(header))
    assert (made is not None) == (decided.decision is Decision.RECORD_AND_SAMPLE)
    if made is not None:
        assert int(made.trace, 16) == trace and made.is_sampled
        assert parse_traceparent(format_traceparent(made)) == made


def test_what_is_not_sampled_is_not_made() -> None:
    traced = Traced()
    record = SpanRecord(
        name="x",
        start=1.0,
        end=2.0,
        attributes={"a": 1},
        events=(SpanEvent("chunk", 1.0, {}),),
        children=(a_span("y", 1.0, 2.0),),
    )
    OFF.begin(CLIENT, "a=1").end(record)
    OFF.record(CLIENT, record)
    traced.tracing.record(UNSAMPLED, record)
    assert not traced.tracing.would_record(UNSAMPLED)
    traced.tracing.begin(UNSAMPLED, "a=1").end(record)
    assert traced.made == []
    traced.tracing.begin(CLIENT, "a=1").end(record)
    assert [span.name for span in traced.made] == ["y", "x"]


def test_a_span_keeps_to_opentelemetry_s_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "3"),
        ("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "1"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4"),
    ):
        monkeypatch.setenv(name, limit)
    traced = Traced()
    events = tuple(SpanEvent(f"e{number}", float(number), {"a": "longer", "b": 1}) for number in range(5))
    wide = {"a": "longer", "b": "long", "c": "x"}
    traced.tracing.record(CLIENT, SpanRecord(name="x", start=1.0, end=2.0, attributes=wide, events=events))
    (span,) = traced.made
    assert dict(span.attributes or {}) == {"b": "long", "c": "x"} and span.dropped_attributes == 1
    assert [event.name for event in span.events] == ["e2", "e3", "e4"] and span.dropped_events == 2
    assert [dict(event.attributes or {}) for event in span.events] == [{"b": 1}] * 3
    assert span.events[0].dropped_attributes == 1


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (CLIENT, True),
        (CLIENT.replace("-01", "-ff"), True),
        (CLIENT.replace("00-", "01-") + "-more", True),
        (CLIENT.replace("00-", "cc-"), True),
        (CLIENT.replace("00-", "ff-"), False),
        (CLIENT + "-more", False),
        (CLIENT.replace("00-", "01-") + "more", False),
        (CLIENT.upper(), False),
        (CLIENT + "\n", False),
        (" " + CLIENT, False),
        (f"00-{'0' * 32}-{'cd' * 8}-01", False),
        (f"00-{'ab' * 16}-{'0' * 16}-01", False),
        (f"00-{'٣' * 32}-{'cd' * 8}-01", False),
        ("", False),
    ],
)
def test_a_traceparent_is_parsed_as_w3c_specifies(text: str, is_read: bool) -> None:
    assert (parse_traceparent(text) is not None) == is_read
    assert Traced().tracing.would_record(text) == is_read


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{31,33}-[0-9a-f]{15,17}-[0-9a-f]{2}.?"), st.text())
def test_no_header_is_too_strange(traceparent: str, tracestate: str) -> None:
    for tracing in (OFF, Traced(TraceSampling(0.0, is_parent_based=False)).tracing, TRACED.tracing):
        trace = tracing.begin(traceparent, tracestate)
        assert trace.is_sampled or trace.traceparent in (traceparent, "")
        trace.end(a_span("chat", 1.0, 2.0))
        tracing.record(traceparent, a_span("decode", 1.0, 2.0))
    TRACED.made.clear()


TRACED = Traced()


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a=1,b@c=2 , ,x/y=z", [("a", "1"), ("b@c", "2"), ("x/y", "z")]),
        ("a=1,a=2", []),
        ("a=1,B=2", []),
        ("a", []),
        (",".join(f"k{i}=v" for i in range(33)), []),
        (",".join(f"k{i}=" + "v" * 200 for i in range(3)), []),
        ("a=" + "v" * 300, []),
        ("", []),
    ],
)
def test_a_tracestate_is_read_whole_or_not_at_all(text: str, pairs: list[tuple[str, str]]) -> None:
    assert parse_tracestate(text) == pairs


def test_what_clients_send_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    for traceparent in (CLIENT, "x" * 600):
        for tracestate in ("a", "a=1,a=2", "x" * 600, ",".join(f"k{i}=v" for i in range(33)), "a=\x00"):
            TRACED.tracing.begin(traceparent, tracestate)
    assert caplog.records == []
