"""Convert spans to the SDK's ReadableSpan, for exporters of the SDK that need it."""

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
    """Export spans of one process through an exporter of the SDK."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self._limits = SpanLimitSettings()

    def pack(self, span: EndedSpan) -> EndedSpan:
        return span

    def export(self, spans: Sequence[EndedSpan]) -> SpanExportResult:
        return self._exporter.export([readable(span, self._resource, self._limits) for span in spans])

    def shutdown(self) -> None:
        self._exporter.shutdown()


def readable(span: EndedSpan, resource: Resource, limits: SpanLimitSettings) -> ReadableSpan:
    record = span.record
    return ReadableSpan(
        record.name,
        _span_context(span.own, span.state, is_remote=False),
        None if span.parent is None else _span_context(span.parent, span.state, is_remote=span.is_entry),
        resource,
        limits.attributes(record.attributes),
        limits.events(record.events),
        kind=_KINDS[record.kind],
        status=Status(StatusCode.ERROR, record.error) if record.error else Status(StatusCode.UNSET),
        start_time=nanoseconds(record.start),
        end_time=nanoseconds(record.end),
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _span_context(context: TraceParent, state: str, *, is_remote: bool) -> SpanContext:
    trace_state = TraceState(parse_tracestate(state)) if state else None
    return SpanContext(int(context.trace, 16), int(context.span, 16), is_remote, TraceFlags(context.flags), trace_state)
