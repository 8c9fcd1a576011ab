"""Makes OpenTelemetry's spans of records that are over; never decides what they tell, and never sends them.

Not by the SDK's tracer: a span that can be open, changed and ended by anybody costs it thirty microseconds, and ours
need none of that. Its samplers, ids and limits, which its variables set, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, DEFAULT_ON, Decision, Sampler
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from tandem.obs.tracing import Attributes, SpanEvent, SpanRecord

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_FINE = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("tandem")


class SpanMaker:
    """The Spans of one process. `put_one` takes each span that is made, those inside another before it."""

    def __init__(self, resource: Resource, sampler: Sampler, put_one: Callable[[ReadableSpan], None]) -> None:
        self._resource = resource
        self._sampler = sampler
        self._takes_all = sampler is DEFAULT_ON or sampler is ALWAYS_ON
        self._put_one = put_one
        self._ids = RandomIdGenerator()
        self._limits = SpanLimits()

    def sample(self, parent: SpanContext | None) -> SpanContext | None:
        if parent is None:
            trace, context = self._ids.generate_trace_id(), Context()
            flags = TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID
        else:
            trace, context = parent.trace_id, set_span_in_context(NonRecordingSpan(parent), Context())
            flags = TraceFlags.SAMPLED | (parent.trace_flags & TraceFlags.RANDOM_TRACE_ID)
        span = self._ids.generate_span_id()
        if parent is None and self._takes_all:  # by default: there is no need to ask
            return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(flags))
        decided = self._sampler.should_sample(context, trace, "request", SpanKind.SERVER)
        if decided.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(flags), trace_state=decided.trace_state)

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
