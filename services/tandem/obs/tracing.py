"""Makes spans of what requests and jobs have been through; never decides what they tell, and never sends them.

Spans are made when they are over, so that what serves requests keeps a few times instead of open spans. Only a
request's root begins with it, because its ids travel on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from tandem.obs.trace_context import TraceParent, format_traceparent, parse_traceparent, parse_tracestate

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}


class SpanEvent(NamedTuple):
    """`at`: seconds since the epoch."""

    name: str
    at: float
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A span that is over, with those inside it. `start` and `end` are seconds since the epoch. `error` says what went
    wrong; empty: nothing."""

    name: str
    start: float
    end: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    children: tuple[SpanRecord, ...] = ()
    error: str = ""
    kind: Literal["internal", "server", "client"] = "internal"


class Trace:
    """This process's part of one request's trace, from its arrival to `end`.

    `id` is 32 hexadecimal digits, or empty where it is not sampled. `traceparent` is to be passed on: our root's, or
    where nothing is traced here the client's own, unchanged; empty where it has none.
    """

    __slots__ = ("_root", "_tracer", "id", "traceparent")

    def __init__(self, traceparent: str, tracer: Tracer | None = None, root: Span | None = None) -> None:
        self.traceparent = traceparent
        self._tracer = tracer
        self._root = root
        self.id = "" if root is None else f"{root.get_span_context().trace_id:032x}"

    @property
    def is_sampled(self) -> bool:
        return self._root is not None

    def end(self, span: SpanRecord) -> None:
        """Exactly once. The root's `start` and `kind` are those that it began with."""
        if self._root is None or self._tracer is None:
            return
        self._root.update_name(span.name)
        _finish(self._tracer, self._root, span)


class Tracing:
    """Without a `tracer` it traces nothing, and passes on what came."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def begin(
        self, traceparent: str, tracestate: str, start: float, kind: Literal["server", "internal"] = "server"
    ) -> Trace:
        """For a request that arrived at `start`, with these headers; what is no valid header counts as none."""
        parent = parse_traceparent(traceparent) if traceparent else None
        own = traceparent if parent is not None else ""
        if self._tracer is None:
            return Trace(own)
        root = self._tracer.start_span("request", _context(parent, tracestate), _KINDS[kind], start_time=_ns(start))
        told = root.get_span_context()
        if not told.trace_flags.sampled:
            return Trace(own)
        passed_on = format_traceparent(TraceParent(told.trace_id, told.span_id, told.trace_flags))
        return Trace(passed_on, self._tracer, root)

    def record(self, traceparent: str, span: SpanRecord) -> None:
        """A span whose parent is elsewhere; nothing where that one is not sampled."""
        parent = parse_traceparent(traceparent) if self._tracer is not None and traceparent else None
        if self._tracer is not None and parent is not None and parent.is_sampled:
            _make(self._tracer, _context(parent, ""), span)

    def is_wanted(self, traceparent: str) -> bool:
        """Whether `record` would do something, so that nobody puts a record together for nothing."""
        if self._tracer is None or not traceparent:
            return False
        parent = parse_traceparent(traceparent)
        return parent is not None and parent.is_sampled


OFF = Tracing(None)


def _make(tracer: Tracer, context: Context, span: SpanRecord) -> None:
    made = tracer.start_span(span.name, context, _KINDS[span.kind], start_time=_ns(span.start))
    if made.is_recording():
        _finish(tracer, made, span)


def _finish(tracer: Tracer, made: Span, span: SpanRecord) -> None:
    made.set_attributes(span.attributes)
    for event in span.events:
        made.add_event(event.name, event.attributes, _ns(event.at))
    if span.error:
        made.set_status(Status(StatusCode.ERROR, span.error))
    inside = set_span_in_context(made, Context())
    for child in span.children:
        _make(tracer, inside, child)
    made.end(_ns(span.end))


def _context(parent: TraceParent | None, tracestate: str) -> Context:
    if parent is None:
        return Context()
    state = TraceState(parse_tracestate(tracestate)) if tracestate else None
    told = SpanContext(
        parent.trace, parent.span, is_remote=True, trace_flags=TraceFlags(parent.flags), trace_state=state
    )
    return set_span_in_context(NonRecordingSpan(told), Context())


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
