"""Traces of what requests and jobs have been through; never decides what they tell, and never makes or sends a span.

Spans are told when they are over, so that what serves requests keeps a few times instead of open spans. Of a request's
root only the ids are there from its beginning, because they travel on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from tandem.obs.trace_context import TraceParent, format_traceparent, parse_traceparent, parse_tracestate

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]
Kind = Literal["internal", "server", "client"]


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
    kind: Kind = "internal"


class Spans(Protocol):
    """Whoever makes spans of records, and has them sent."""

    def sample(self, parent: SpanContext | None) -> SpanContext | None:
        """Of a span to come, in its parent's trace or a new one; None where that is not sampled."""
        ...

    def put(self, context: SpanContext, parent: SpanContext | None, span: SpanRecord) -> None:
        """What was sampled is over, and with it all that is inside. Must not block."""
        ...


class Trace:
    """This process's part of one request's trace, from its arrival to `end`.

    `id` is 32 hexadecimal digits, or empty where it is not sampled. `traceparent` is to be passed on: our root's, or
    where nothing is traced here the client's own, unchanged; empty where it has none.
    """

    __slots__ = ("_parent", "_root", "_spans", "id", "traceparent")

    def __init__(
        self,
        traceparent: str,
        spans: Spans | None = None,
        root: SpanContext | None = None,
        parent: SpanContext | None = None,
    ) -> None:
        self.traceparent = traceparent
        self._spans = spans
        self._root = root
        self._parent = parent
        self.id = "" if root is None else f"{root.trace_id:032x}"

    @property
    def is_sampled(self) -> bool:
        return self._root is not None

    def end(self, span: SpanRecord) -> None:
        """Exactly once."""
        if self._spans is not None and self._root is not None:
            self._spans.put(self._root, self._parent, span)


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
        told = None if parent is None else _remote(parent, tracestate)
        root = self._spans.sample(told)
        if root is None:
            return Trace(own)
        passed_on = format_traceparent(TraceParent(root.trace_id, root.span_id, root.trace_flags))
        return Trace(passed_on, self._spans, root, told)

    def record(self, traceparent: str, span: SpanRecord) -> None:
        """A span whose parent is elsewhere; nothing where that one is not sampled."""
        parent = parse_traceparent(traceparent) if self._spans is not None and traceparent else None
        if self._spans is None or parent is None or not parent.is_sampled:
            return
        told = _remote(parent, "")
        context = self._spans.sample(told)
        if context is not None:
            self._spans.put(context, told, span)

    def is_wanted(self, traceparent: str) -> bool:
        """Whether `record` would do something, so that nobody puts a record together for nothing."""
        if self._spans is None or not traceparent:
            return False
        parent = parse_traceparent(traceparent)
        return parent is not None and parent.is_sampled


OFF = Tracing(None)


def _remote(parent: TraceParent, tracestate: str) -> SpanContext:
    state = TraceState(parse_tracestate(tracestate)) if tracestate else None
    return SpanContext(
        parent.trace, parent.span, is_remote=True, trace_flags=TraceFlags(parent.flags), trace_state=state
    )
