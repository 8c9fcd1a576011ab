"""Spans as OTLP's messages; never sends one.

The SDK's own encoder copies each message into the next larger one and takes five times as long, in the interpreter's
lock, while streams wait. Most attributes say what others of their name have said: the bytes of those are kept, and only
put together again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2 as pb
from opentelemetry.sdk.resources import Resource

from tandem.obs.span_limits import Limits, nanoseconds, num_dropped
from tandem.obs.tracing import EndedSpan, Kind, SpanEvent, SpanRecord

SCOPE = "tandem"
_log = logging.getLogger(__name__)
_KINDS: Mapping[Kind, Any] = {
    "internal": pb.Span.SPAN_KIND_INTERNAL,
    "server": pb.Span.SPAN_KIND_SERVER,
    "client": pb.Span.SPAN_KIND_CLIENT,
}
_FIELDS = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_LOCAL = pb.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | pb.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_FINE = pb.Status()
_MAX_KEPT = 1024
_LONG = 16
"""Characters: a longer text is an identity or a list more often than not, and comes once."""
_double = Struct("<d").pack


class SpanEncoder:
    """Of one process. One thread at a time."""

    def __init__(self, resource: Resource) -> None:
        self._limits = Limits()
        self._start = ExportTraceServiceRequest()
        of_process = self._start.resource_spans.add(schema_url=resource.schema_url)
        _attributes(resource.attributes, of_process.resource.attributes)
        of_process.scope_spans.add().scope.name = SCOPE

    def encode(self, spans: Sequence[EndedSpan]) -> ExportTraceServiceRequest:
        """One that OTLP has no form for is left out, and logged."""
        request = ExportTraceServiceRequest()
        if not spans:
            return request
        request.CopyFrom(self._start)
        of_scope = request.resource_spans[0].scope_spans[0]
        for span in spans:
            num_before = len(of_scope.spans)
            try:
                self._encode(span.told, _placed(span, of_scope))
            except (TypeError, ValueError, OverflowError):
                del of_scope.spans[num_before:]
                _log.exception("telemetry: the span %r cannot be sent", span.told.name)
        return request

    def _encode(self, span: SpanRecord, told: pb.Span) -> None:
        told.name = span.name
        attributes = self._limits.attributes(span.attributes)
        _known_attributes(attributes, told)
        told.dropped_attributes_count = num_dropped(attributes)
        if span.events:
            self._encode_events(span.events, told)
        if span.error:
            told.status.code = pb.Status.STATUS_CODE_ERROR
            told.status.message = span.error

    def _encode_events(self, events: Sequence[SpanEvent], told: pb.Span) -> None:
        kept = self._limits.events(events)
        for event in kept:
            at = told.events.add(name=event.name, time_unix_nano=event.timestamp)
            _attributes(event.attributes or {}, at.attributes)
            at.dropped_attributes_count = event.dropped_attributes
        told.dropped_events_count = num_dropped(kept)


def _placed(span: EndedSpan, of_scope: pb.ScopeSpans) -> pb.Span:
    trace, own, _ = span.own
    parent, told = span.parent, span.told
    return of_scope.spans.add(
        trace_id=trace.to_bytes(16, "big"),
        span_id=own.to_bytes(8, "big"),
        trace_state=span.state,
        parent_span_id=b"" if parent is None else parent.span.to_bytes(8, "big"),
        flags=_REMOTE if span.is_entry and parent is not None else _LOCAL,
        kind=_KINDS[told.kind],
        start_time_unix_nano=nanoseconds(told.start),
        end_time_unix_nano=nanoseconds(told.end),
        status=_FINE,
    )


def _known_attributes(values: Mapping[str, Any], told: pb.Span) -> None:
    """As `_attributes`, but for a span: what is known comes by the batch."""
    known: list[bytes] = []
    for name, value in values.items():
        kind = type(value)
        if kind is float:
            known += (_before_double(name), _double(value))
        elif kind is not str or len(value) <= _LONG:
            known.append(_attribute(name, value))
        else:
            told.MergeFromString(b"".join(known))
            known.clear()
            told.attributes.add(key=name, value={"string_value": value})
    told.MergeFromString(b"".join(known))


@lru_cache(_MAX_KEPT)
def _before_double(name: str) -> bytes:
    """Of a span's attribute, all but the eight bytes of its value, which are the last."""
    return _attribute(name, 0.0)[:-8]


@lru_cache(_MAX_KEPT, typed=True)
def _attribute(name: str, value: Any) -> bytes:
    """A span of nothing but it. What is merged adds to what a span has."""
    span = pb.Span()
    _attributes({name: value}, span.attributes)
    return span.SerializeToString()


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
