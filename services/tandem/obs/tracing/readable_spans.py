"""Spans as OpenTelemetry's SDK has them, for exporters that are its own; never sends one."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tandem.obs.tracing.otlp_spans import SCOPE
from tandem.obs.tracing.span_limits import SpanLimitSettings, nanoseconds
from tandem.obs.tracing.trace_context import TraceParent, parse_tracestate
from tandem.obs.tracing.tracing import EndedSpan

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}


class ReadableSpans:
    """A SpanExporter for spans of one process, by one of the SDK's."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self._limits = SpanLimitSettings()

    def packed(self, span: EndedSpan) -> EndedSpan:
        return span

    def export(self, spans: Sequence[EndedSpan]) -> SpanExportResult:
        return self._exporter.export([readable(span, self._resource, self._limits) for span in spans])

    def shutdown(self) -> None:
        self._exporter.shutdown()


def readable(span: EndedSpan, resource: Resource, limits: SpanLimitSettings) -> ReadableSpan:
    told = span.told
    return ReadableSpan(
        told.name,
        _context(span.own, span.state, is_remote=False),
        None if span.parent is None else _context(span.parent, span.state, is_remote=span.is_entry),
        resource,
        limits.attributes(told.attributes),
        limits.events(told.events),
        kind=_KINDS[told.kind],
        status=Status(StatusCode.ERROR, told.error) if told.error else Status(StatusCode.UNSET),
        start_time=nanoseconds(told.start),
        end_time=nanoseconds(told.end),
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _context(place: TraceParent, state: str, *, is_remote: bool) -> SpanContext:
    known = TraceState(parse_tracestate(state)) if state else None
    return SpanContext(int(place.trace, 16), int(place.span, 16), is_remote, TraceFlags(place.flags), known)
