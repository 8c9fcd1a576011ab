"""Traces of what requests and jobs have been through; never decides what they tell, and never makes or sends a span.

Spans are told when they are over, so that what serves requests keeps a few times instead of open spans. Of a request's
root only the ids are there from its beginning, because they travel on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from tandem.obs.tracing.span_attributes import Value
from tandem.obs.tracing.trace_context import TraceParent, format_traceparent, known_tracestate, parse_traceparent

Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]


class SpanEvent(NamedTuple):
    """`at`: seconds since the epoch."""

    name: str
    at: float
    attributes: Attributes


class SpanRecord(NamedTuple):
    """A span that is over, with those inside it. `start` and `end` are seconds since the epoch. `error` says what went
    wrong; empty: nothing."""

    name: str
    start: float
    end: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    children: tuple[SpanRecord, ...] = ()
    error: str = ""
    kind: Kind = "internal"


class EndedSpan(NamedTuple):
    """A span with its place in a trace. `parent` is in another program where the span `is_entry`; None: the trace
    begins here. `state`: the trace's tracestate header, if any."""

    own: TraceParent
    parent: TraceParent | None
    is_entry: bool
    state: str
    told: SpanRecord


class Spans(Protocol):
    """Whoever places spans, and has them sent."""

    def sample(self, parent: TraceParent | None) -> TraceParent | None:
        """Of a span to come, in its parent's trace or a new one; None where that is not sampled."""
        ...

    def put(self, span: EndedSpan) -> None:
        """What was sampled is over, and with it all that is inside. Must not block."""
        ...


class Trace:
    """This process's part of one request's trace, from its arrival to `end`.

    `id` is 32 hexadecimal digits, or empty where it is not sampled. `traceparent` is to be passed on: our root's, or
    where nothing is traced here the client's own, unchanged; empty where it has none.
    """

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
        """Exactly once."""
        if self._spans is not None and self._root is not None:
            self._spans.put(EndedSpan(self._root, self._parent, True, self._state, span))


class Tracing:
    """Without `spans` it traces nothing, and passes on what came."""

    def __init__(self, spans: Spans | None) -> None:
        self._spans = spans

    def begin(self, traceparent: str, tracestate: str) -> Trace:
        """For a request with these headers; what is no valid header counts as none."""
        parent = parse_traceparent(traceparent) if traceparent else None
        own = traceparent if parent is not None else ""
        if self._spans is None:
            return Trace(own)
        root = self._spans.sample(parent)
        if root is None:
            return Trace(own)
        state = known_tracestate(tracestate) if parent is not None and tracestate else ""
        return Trace(format_traceparent(root), self._spans, root, parent, state)

    def record(self, traceparent: str, span: SpanRecord) -> None:
        """A span whose parent is elsewhere; nothing where that one is not sampled."""
        parent = parse_traceparent(traceparent) if self._spans is not None and traceparent else None
        if self._spans is None or parent is None or not parent.is_sampled:
            return
        own = self._spans.sample(parent)
        if own is not None:
            self._spans.put(EndedSpan(own, parent, True, "", span))

    def is_wanted(self, traceparent: str) -> bool:
        """Whether `record` would do something, so that nobody puts a record together for nothing."""
        if self._spans is None or not traceparent:
            return False
        parent = parse_traceparent(traceparent)
        return parent is not None and parent.is_sampled


OFF = Tracing(None)
