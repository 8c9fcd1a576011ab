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
    """This process' part of one request's trace.

    `span` is the root span here, which records nothing where the trace is not sampled. `id` is 32 hexadecimal digits,
    empty where the trace is not sampled. `traceparent` is the header to propagate: that of the root span, or the
    client's own, unchanged, where nothing is traced here; empty where there is none."""

    span: Span
    id: str
    traceparent: str


def begin_trace(tracer: Tracer, name: str, start_s: float, traceparent: str, tracestate: str) -> Trace:
    """Begin the trace of a request with these headers; invalid headers count as missing. `start_s`: seconds since the
    epoch."""
    parent = remote_parent(traceparent, tracestate)
    span = tracer.start_span(name, parent, SpanKind.SERVER, start_time=nanoseconds(start_s))
    if not span.is_recording():
        return Trace(span, "", traceparent if get_current_span(parent).get_span_context().is_valid else "")
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span, Context()))
    return Trace(span, format_trace_id(span.get_span_context().trace_id), headers["traceparent"])


def remote_parent(traceparent: str, tracestate: str = "") -> Context:
    """Return the context of the other program's span that these headers name; an empty one where there is none."""
    return _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


def end_span(span: Span, end_s: float, error: str = "") -> None:
    """End a span at `end_s` seconds since the epoch, as failed where there is an `error`."""
    if error:
        span.set_status(StatusCode.ERROR, error)
    span.end(nanoseconds(end_s))


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
