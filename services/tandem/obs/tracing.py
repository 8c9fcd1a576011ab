"""Begin, join and pass on traces with OpenTelemetry's tracer, which creates the spans and samples them.

This module needs OpenTelemetry's API only; `exporters` creates the SDK's tracer where spans are sent."""

from __future__ import annotations

import logging
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

OFF: Tracer = NoOpTracer()
"""Tracer of a process that sends no spans."""
_W3C = TraceContextTextMapPropagator()
# The propagator logs invalid headers, which come from clients, at WARNING.
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


class Trace(NamedTuple):
    """Hold this process's part of the trace of one request.

    `span`: the root span of this process, which records nothing where the trace is not sampled. `id`: the trace's id as
    32 hexadecimal digits; empty where the trace is not sampled. `traceparent`: the header to send to other processes.
    Where the trace is sampled, it names `span` as their parent; otherwise it is the client's own header, or empty if
    the client sent no valid one.
    """

    span: Span
    id: str
    traceparent: str


def begin_trace(tracer: Tracer, name: str, start_s: float, traceparent: str, tracestate: str) -> Trace:
    """Begin the root span of a request in this process and return it as a `Trace`.

    `name`: the name of the span. `start_s`: the time at which it begins, in seconds since the epoch. `traceparent`,
    `tracestate`: the client's headers, which name the parent span; invalid ones count as missing."""
    parent = remote_parent(traceparent, tracestate)
    span = tracer.start_span(name, parent, SpanKind.SERVER, start_time=nanoseconds(start_s))
    if not span.is_recording():
        is_valid = bool(traceparent) and get_current_span(parent).get_span_context().is_valid
        return Trace(span, "", traceparent if is_valid else "")
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span, Context()))
    return Trace(span, format_trace_id(span.get_span_context().trace_id), headers["traceparent"])


def remote_parent(traceparent: str, tracestate: str = "") -> Context:
    """Return the context of the caller's span that the headers `traceparent` and `tracestate` name; an empty context
    where they are missing or invalid."""
    if not traceparent:
        return Context()
    return _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


def end_span(span: Span, end_s: float, error: str = "") -> None:
    """End a span at the time `end_s`, seconds since the epoch; it counts as failed where `error`, the message, is not
    empty."""
    if error:
        span.set_status(StatusCode.ERROR, error)
    span.end(nanoseconds(end_s))


def nanoseconds(seconds: float) -> int:
    """Convert seconds to whole nanoseconds."""
    return round(seconds * 1e9)
