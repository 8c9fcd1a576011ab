"""Trace requests and jobs.

Spans are recorded when they end: until then a few times are kept instead of an open span. Only the ids of a request's
root span exist from the beginning, because they are propagated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from tandem.obs.tracing.span_attributes import Value
from tandem.obs.tracing.trace_context import TraceParent, format_traceparent, normalize_tracestate, parse_traceparent

Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]


class SpanEvent(NamedTuple):
    """Event within a span. `at`: seconds since the epoch."""

    name: str
    at: float
    attributes: Attributes


class SpanRecord(NamedTuple):
    """Ended span with its children. `start` and `end` are seconds since the epoch; `error` is empty without an
    error."""

    name: str
    start: float
    end: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    children: tuple[SpanRecord, ...] = ()
    error: str = ""
    kind: Kind = "internal"


class EndedSpan(NamedTuple):
    """Ended span with its ids.

    `parent` is a span of another program where `is_entry`; None where the trace begins here. `state` is the trace's
    tracestate header, empty where there is none."""

    own: TraceParent
    parent: TraceParent | None
    is_entry: bool
    state: str
    record: SpanRecord


class Spans(Protocol):
    """Sample traces, and send ended spans."""

    def sample(self, parent: TraceParent | None) -> TraceParent | None:
        """Return the ids of a new span, in its parent's trace or in a new one; None where the trace is not sampled."""
        ...

    def put(self, span: EndedSpan) -> None:
        """Record a sampled span that has ended, with its children. Must not block."""
        ...


class Trace:
    """This process' part of one request's trace, from the request's arrival to `end`.

    `id` is 32 hexadecimal digits, empty where the trace is not sampled. `traceparent` is the header to propagate: that
    of the root span here, or the client's own, unchanged, where nothing is traced here; empty where there is none."""

    __slots__ = ("_parent", "_root", "_spans", "_state", "id", "traceparent")

    def __init__(
        self,
        traceparent: str,
        spans: Spans | None = None,
        root: TraceParent | None = None,
        parent: TraceParent | None = None,
        state: str = "",
    ) -> None:
        self.traceparent = traceparent
        self._spans = spans
        self._root = root
        self._parent = parent
        self._state = state
        self.id = "" if root is None else root.trace

    @property
    def is_sampled(self) -> bool:
        return self._root is not None

    def end(self, span: SpanRecord) -> None:
        """Record the root span; to be called exactly once."""
        if self._spans is not None and self._root is not None:
            self._spans.put(EndedSpan(self._root, self._parent, True, self._state, span))


class Tracing:
    """Begin and record traces. Without `spans` nothing is traced, and headers are passed on."""

    def __init__(self, spans: Spans | None) -> None:
        self._spans = spans

    def begin(self, traceparent: str, tracestate: str) -> Trace:
        """Begin the trace of a request with these headers; invalid headers count as missing."""
        parent = parse_traceparent(traceparent) if traceparent else None
        own = traceparent if parent is not None else ""
        if self._spans is None:
            return Trace(own)
        root = self._spans.sample(parent)
        if root is None:
            return Trace(own)
        state = normalize_tracestate(tracestate) if parent is not None and tracestate else ""
        return Trace(format_traceparent(root), self._spans, root, parent, state)

    def record(self, traceparent: str, span: SpanRecord) -> None:
        """Record a span whose parent is in another program; does nothing where the parent is not sampled."""
        parent = parse_traceparent(traceparent) if self._spans is not None and traceparent else None
        if self._spans is None or parent is None or not parent.is_sampled:
            return
        own = self._spans.sample(parent)
        if own is not None:
            self._spans.put(EndedSpan(own, parent, True, "", span))

    def would_record(self, traceparent: str) -> bool:
        """Return whether `record` would record a span, so that callers need not build one in vain."""
        if self._spans is None or not traceparent:
            return False
        parent = parse_traceparent(traceparent)
        return parent is not None and parent.is_sampled


OFF = Tracing(None)
