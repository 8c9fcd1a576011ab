"""Makes OpenTelemetry's spans of records that are over; never decides what they tell, and never sends them.

Not by the SDK's tracer: a span that can be open, changed and ended by anybody costs it thirty microseconds, and ours
need none of that. Nor by its samplers, which every request would ask: they decide the same. Ids and limits are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from tandem.obs.otel_environment import Sampling
from tandem.obs.tracing import Attributes, SpanEvent, SpanRecord

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_FINE = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("tandem")
_SAMPLED = TraceFlags.SAMPLED
_RANDOM = (1 << 64) - 1
"""Of a trace's id, the bits by which all programs of a trace decide alike."""


class SpanMaker:
    """The Spans of one process. `put_one` takes each span that is made, those inside another before it."""

    def __init__(self, resource: Resource, sampling: Sampling, put_one: Callable[[ReadableSpan], None]) -> None:
        self._resource = resource
        self._heeds_parent = sampling.heeds_parent
        self._bound = round(sampling.ratio * (_RANDOM + 1))
        self._put_one = put_one
        self._ids = RandomIdGenerator()
        self._limits = SpanLimits()

    def sample(self, parent: SpanContext | None) -> SpanContext | None:
        if parent is None:
            trace, flags, state = self._ids.generate_trace_id(), _SAMPLED | TraceFlags.RANDOM_TRACE_ID, None
        else:
            trace, state = parent.trace_id, parent.trace_state
            flags = _SAMPLED | (parent.trace_flags & TraceFlags.RANDOM_TRACE_ID)
        if parent is not None and self._heeds_parent:
            is_sampled = parent.trace_flags.sampled
        else:
            is_sampled = trace & _RANDOM < self._bound
        if not is_sampled:
            return None
        own = self._ids.generate_span_id()
        return SpanContext(trace, own, is_remote=False, trace_flags=TraceFlags(flags), trace_state=state)

    def put(self, context: SpanContext, parent: SpanContext | None, span: SpanRecord) -> None:
        for child in span.children:
            own = SpanContext(
                context.trace_id,
                self._ids.generate_span_id(),
                is_remote=False,
                trace_flags=context.trace_flags,
                trace_state=context.trace_state,
            )
            self.put(own, context, child)
        self._put_one(
            ReadableSpan(
                span.name,
                context,
                parent,
                self._resource,
                self._bounded(span.attributes),
                self._events(span.events) if span.events else (),
                kind=_KINDS[span.kind],
                status=Status(StatusCode.ERROR, span.error) if span.error else _FINE,
                start_time=_ns(span.start),
                end_time=_ns(span.end),
                instrumentation_scope=_SCOPE,
            )
        )

    def _bounded(self, attributes: Attributes) -> Attributes | BoundedAttributes:
        """Within the limits; it is told how many had no place."""
        most, chars = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        if chars is None and (most is None or len(attributes) <= most):
            return attributes
        return BoundedAttributes(most, dict(attributes), max_value_len=chars)

    def _events(self, events: tuple[SpanEvent, ...]) -> Sequence[Event]:
        """The last ones, within the limits."""
        most, chars = self._limits.max_event_attributes, self._limits.max_attribute_length
        told = [
            Event(each.name, BoundedAttributes(most, dict(each.attributes), max_value_len=chars), _ns(each.at))
            for each in events
        ]
        bounded: Sequence[Event] = BoundedList.from_seq(self._limits.max_events, told)
        return bounded


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
