"""Apply OpenTelemetry's limits on the attributes and events of a span."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, SpanLimits
from opentelemetry.sdk.util import BoundedList

from tandem.obs.tracing.tracing import Attributes, SpanEvent


class SpanLimitSettings:
    """Hold the limits that the environment variables set."""

    def __init__(self) -> None:
        self._limits = SpanLimits()

    def attributes(self, given: Attributes) -> Attributes | BoundedAttributes:
        """Return the attributes within the limits, the last ones where there are too many; the result counts the
        dropped ones."""
        most, chars = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        if chars is None and (most is None or len(given) <= most):
            return given
        return BoundedAttributes(most, dict(given), max_value_len=chars)

    def events(self, given: Sequence[SpanEvent]) -> Sequence[Event]:
        """Return the events within the limits, each with its attributes within theirs."""
        if not given:
            return ()
        most, chars = self._limits.max_event_attributes, self._limits.max_attribute_length
        limited = [
            Event(each.name, BoundedAttributes(most, dict(each.attributes), max_value_len=chars), nanoseconds(each.at))
            for each in given
        ]
        bounded: Sequence[Event] = BoundedList.from_seq(self._limits.max_events, limited)
        return bounded


def num_dropped(kept: object) -> int:
    """Return how many attributes or events `SpanLimitSettings` dropped from a result of its methods."""
    return kept.dropped if isinstance(kept, BoundedAttributes | BoundedList) else 0


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
