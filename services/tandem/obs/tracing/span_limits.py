"""How much a span may tell, by OpenTelemetry's variables; never what it tells."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, SpanLimits
from opentelemetry.sdk.util import BoundedList

from tandem.obs.tracing.tracing import Attributes, SpanEvent


class SpanLimitSettings:
    """As the environment has them."""

    def __init__(self) -> None:
        self._limits = SpanLimits()

    def attributes(self, given: Attributes) -> Attributes | BoundedAttributes:
        """Those that are kept, the last ones; it is told how many are not."""
        most, chars = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        if chars is None and (most is None or len(given) <= most):
            return given
        return BoundedAttributes(most, dict(given), max_value_len=chars)

    def events(self, given: Sequence[SpanEvent]) -> Sequence[Event]:
        """As attributes, each with its own."""
        if not given:
            return ()
        most, chars = self._limits.max_event_attributes, self._limits.max_attribute_length
        told = [
            Event(each.name, BoundedAttributes(most, dict(each.attributes), max_value_len=chars), nanoseconds(each.at))
            for each in given
        ]
        bounded: Sequence[Event] = BoundedList.from_seq(self._limits.max_events, told)
        return bounded


def num_dropped(kept: object) -> int:
    """Of what `SpanLimitSettings` have kept."""
    return kept.dropped if isinstance(kept, BoundedAttributes | BoundedList) else 0


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
