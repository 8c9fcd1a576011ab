"""Spans as OTLP's messages; never sends one.

The SDK's own encoder copies each message into the next larger one and takes five times as long, in the interpreter's
lock, while streams wait.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2 as pb
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

_log = logging.getLogger(__name__)
_KINDS = {
    SpanKind.INTERNAL: pb.Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: pb.Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: pb.Span.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: pb.Span.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: pb.Span.SPAN_KIND_CONSUMER,
}
_CODES = {
    StatusCode.UNSET: pb.Status.STATUS_CODE_UNSET,
    StatusCode.OK: pb.Status.STATUS_CODE_OK,
    StatusCode.ERROR: pb.Status.STATUS_CODE_ERROR,
}
_FIELDS = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_LOCAL = pb.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | pb.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """All of one resource and one scope. One that OTLP has no form for is left out, and logged."""
    request = ExportTraceServiceRequest()
    if not spans:
        return request
    of_process = request.resource_spans.add()
    of_process.schema_url = spans[0].resource.schema_url
    _attributes(spans[0].resource.attributes, of_process.resource.attributes)
    of_scope = of_process.scope_spans.add()
    scope = spans[0].instrumentation_scope
    if scope is not None:
        of_scope.scope.name = scope.name
    for span in spans:
        try:
            _encode(span, of_scope.spans.add())
        except (TypeError, ValueError):
            del of_scope.spans[-1]
            _log.exception("telemetry: the span %r cannot be sent", span.name)
    return request


def _encode(span: ReadableSpan, told: pb.Span) -> None:
    context, parent = span.context, span.parent
    assert context is not None
    told.trace_id = context.trace_id.to_bytes(16, "big")
    told.span_id = context.span_id.to_bytes(8, "big")
    if context.trace_state:
        told.trace_state = context.trace_state.to_header()
    told.flags = _LOCAL
    if parent is not None:
        told.parent_span_id = parent.span_id.to_bytes(8, "big")
        told.flags = _REMOTE if parent.is_remote else _LOCAL
    told.name = span.name
    told.kind = _KINDS[span.kind]
    told.start_time_unix_nano = span.start_time or 0
    told.end_time_unix_nano = span.end_time or 0
    _attributes(span.attributes or {}, told.attributes)
    told.dropped_attributes_count = span.dropped_attributes
    for event in span.events:
        at = told.events.add(name=event.name, time_unix_nano=event.timestamp)
        _attributes(event.attributes or {}, at.attributes)
        at.dropped_attributes_count = event.dropped_attributes
    told.dropped_events_count = span.dropped_events
    told.status.code = _CODES[span.status.status_code]
    if span.status.description:
        told.status.message = span.status.description


def _attributes(values: Mapping[str, Any], told: Any) -> None:
    """`told`: a repeated KeyValue."""
    for name, value in values.items():
        field = _FIELDS.get(type(value))
        if field is not None:
            told.add(key=name, value={field: value})  # at once costs less than step by step
        else:
            _put(told.add(key=name).value, value)


def _put(told: AnyValue, value: Any) -> None:
    field = _FIELDS.get(type(value))
    if field is not None:
        setattr(told, field, value)
        return
    told.array_value.SetInParent()
    for each in value:
        _put(told.array_value.values.add(), each)
