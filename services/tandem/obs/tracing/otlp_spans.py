"""Encode spans as OTLP protobuf messages.

The SDK's encoder builds an object per message and copies it into the enclosing one, which takes eight times as long,
holding the GIL while streams wait. The bytes of a message are those of its fields in any order, and most attributes
repeat values: their bytes are cached and only concatenated here. https://protobuf.dev/programming-guides/encoding/
defines the encoding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.trace.v1 import trace_pb2 as pb
from opentelemetry.sdk.resources import Resource

from tandem.obs.tracing.span_attributes import LayeredAttributes, Shared
from tandem.obs.tracing.span_limits import SpanLimitSettings, nanoseconds, num_dropped
from tandem.obs.tracing.tracing import EndedSpan, Kind, SpanEvent

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
_MAX_CACHED = 1024
_LONG = 16
"""Characters: longer strings are mostly identifiers or lists, which do not repeat, so their bytes are not cached."""
_double = Struct("<d").pack
_PLACE = Struct("<2s16s2s8scQcQ2sI")
"""Fields of a span with their tags: trace_id, span_id, start_time_unix_nano, end_time_unix_nano and flags."""
_PARENT = b'"\x08'
"""Tag and length of a span's parent_span_id."""
_RESOURCE_SPANS, _SCOPE_SPANS, _SPANS, _ATTRIBUTES = b"\n", b"\x12", b"\x12", b"J"
"""Tags of fields that a length follows."""
_KEY, _VALUE, _STRING, _INT = b"\n", b"\x12", b"\n", b"\x18"
_BEYOND_INT = 1 << 63
"""Integers below 0 have an encoding of their own, and integers from here on have none."""


class SpanEncoder:
    """Encode the spans of one process. Thread-safe."""

    def __init__(self, resource: Resource) -> None:
        self._limits = SpanLimitSettings()
        process = pb.ResourceSpans(schema_url=resource.schema_url)
        _put_all(resource.attributes, process.resource.attributes)
        process.resource.SetInParent()
        self._process = process.SerializeToString()
        self._scope = pb.ScopeSpans(scope=InstrumentationScope(name=SCOPE)).SerializeToString()

    def encode(self, span: EndedSpan) -> bytes | None:
        """Return a span as a field of a request; None where OTLP cannot represent it, which is logged."""
        try:
            return _field(_SPANS, self._span(span))
        except Exception:
            _log.exception("telemetry: the span %r cannot be sent", span.record.name)
            return None

    def request(self, spans: Sequence[bytes]) -> bytes:
        """Return an ExportTraceServiceRequest of encoded spans."""
        return _field(_RESOURCE_SPANS, self._process + _field(_SCOPE_SPANS, b"".join((self._scope, *spans))))

    def _span(self, span: EndedSpan) -> bytes:
        record = span.record
        parts = [_place(span), _name(record.name, record.kind)]
        attributes = self._limits.attributes(record.attributes)
        if type(attributes) is LayeredAttributes:
            parts.append(_shared(attributes.shared))
            _add_attributes(attributes.own, parts)
            parts.append(_figures(attributes.names, attributes.figures))
        else:
            _add_attributes(attributes, parts)
        if attributes is not record.attributes and (num_left_out := num_dropped(attributes)):
            parts.append(pb.Span(dropped_attributes_count=num_left_out).SerializeToString())
        if span.state or record.error:
            parts.append(pb.Span(trace_state=span.state, status=_status(record.error)).SerializeToString())
        if record.events:
            parts.append(self._events(record.events))
        return b"".join(parts)

    def _events(self, events: Sequence[SpanEvent]) -> bytes:
        kept = self._limits.events(events)
        message = pb.Span(dropped_events_count=num_dropped(kept))
        for event in kept:
            added = message.events.add(name=event.name, time_unix_nano=event.timestamp)
            _put_all(event.attributes or {}, added.attributes)
            added.dropped_attributes_count = event.dropped_attributes
        return message.SerializeToString()


def _field(tag: bytes, body: bytes) -> bytes:
    return b"".join((tag, _varint(len(body)), body))


def _varint(number: int) -> bytes:
    return _SMALL[number] if number < len(_SMALL) else _encode_varint(number)


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SMALL = tuple(map(_encode_varint, range(2048)))


def _place(span: EndedSpan) -> bytes:
    """Encode the ids and times of a span, and whether its parent is remote."""
    trace, own, _ = span.own
    parent, record = span.parent, span.record
    place = _PLACE.pack(
        b"\n\x10", bytes.fromhex(trace),
        b"\x12\x08", bytes.fromhex(own),
        b"9", nanoseconds(record.start),
        b"A", nanoseconds(record.end),
        b"\x85\x01", _REMOTE if span.is_entry and parent is not None else _LOCAL,
    )  # fmt: skip
    return place if parent is None else b"".join((place, _PARENT, bytes.fromhex(parent.span)))


@lru_cache(_MAX_CACHED)
def _name(name: str, kind: Kind) -> bytes:
    return pb.Span(name=name, kind=_KINDS[kind], status=_status("")).SerializeToString()


def _status(error: str) -> pb.Status:
    return pb.Status(code=pb.Status.STATUS_CODE_ERROR, message=error) if error else pb.Status()


def _add_attributes(values: Mapping[str, Any], parts: list[bytes]) -> None:
    for name, value in values.items():
        kind = type(value)
        if kind is float:
            parts += (_before_double(name), _double(value))
        elif kind is str and len(value) > _LONG:
            parts.append(_text(name, value))
        elif kind is int and 0 <= value < _BEYOND_INT:
            parts.append(_number(name, value))
        else:
            parts.append(_attribute(name, value))


def _shared(shared: Shared) -> bytes:
    if shared.encoded is None:
        parts: list[bytes] = []
        _add_attributes(shared.values, parts)
        shared.encoded = b"".join(parts)
    return shared.encoded


def _figures(names: tuple[str, ...], values: Sequence[float]) -> bytes:
    """Encode all numeric attributes at once: the bytes before each value, and its eight bytes."""
    pack, before = _form(names)
    return pack(*chain.from_iterable(zip(before, values, strict=True)))


@lru_cache(_MAX_CACHED)
def _form(names: tuple[str, ...]) -> tuple[Callable[..., bytes], Sequence[bytes]]:
    before = [_before_double(name) for name in names]
    return Struct("<" + "".join(f"{len(each)}sd" for each in before)).pack, before


@lru_cache(_MAX_CACHED)
def _before_double(name: str) -> bytes:
    """Return the encoding of an attribute with a double, without the eight bytes of the value, which come last."""
    return _attribute(name, 0.0)[:-8]


def _text(name: str, value: str) -> bytes:
    body = value.encode()
    return _attribute_of(name, _STRING, _varint(len(body)), body)


def _number(name: str, value: int) -> bytes:
    return _attribute_of(name, _INT, _varint(value), b"")


def _attribute_of(name: str, tag: bytes, begin: bytes, rest: bytes) -> bytes:
    """Encode an attribute at once. Its value is a tag of one byte followed by `begin` and `rest`."""
    key, num_bytes = _key(name), 1 + len(begin) + len(rest)
    size = _varint(num_bytes)
    whole = len(key) + 1 + len(size) + num_bytes
    return b"".join((_ATTRIBUTES, _varint(whole), key, _VALUE, size, tag, begin, rest))


@lru_cache(_MAX_CACHED)
def _key(name: str) -> bytes:
    return _field(_KEY, name.encode())


@lru_cache(_MAX_CACHED, typed=True)
def _attribute(name: str, value: Any) -> bytes:
    """Encode an attribute as the only one of a span."""
    span = pb.Span()
    _put_all({name: value}, span.attributes)
    return span.SerializeToString()


def _put_all(values: Mapping[str, Any], target: Any) -> None:
    """Add attributes to `target`, a repeated KeyValue."""
    for name, value in values.items():
        field = _FIELDS.get(type(value))
        if field is not None:
            target.add(key=name, value={field: value})  # cheaper than `add` and then `_put`
        else:
            _put(target.add(key=name).value, value)


def _put(target: AnyValue, value: Any) -> None:
    field = _FIELDS.get(type(value))
    if field is not None:
        setattr(target, field, value)
        return
    target.array_value.SetInParent()
    for each in value:
        _put(target.array_value.values.add(), each)
