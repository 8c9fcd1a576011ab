"""Gives spans that are over their place in a trace; never decides what they tell, and never sends them.

Not by OpenTelemetry's tracer: a span that can be open, changed and ended by anybody costs it thirty microseconds, and
ours need none of that. Nor by its samplers, which every request would ask: they decide the same.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from tandem.obs.otel_environment import Sampling
from tandem.obs.trace_context import RANDOM, SAMPLED, TraceParent
from tandem.obs.tracing import EndedSpan

_RANDOM_BITS = (1 << 64) - 1
"""Of a trace's id, those by which all programs of a trace decide alike."""


class SpanMaker:
    """The Spans of one process. `put_one` takes each span, those inside another before it."""

    def __init__(self, sampling: Sampling, put_one: Callable[[EndedSpan], None]) -> None:
        self._heeds_parent = sampling.heeds_parent
        self._bound = round(sampling.ratio * (_RANDOM_BITS + 1))
        self._put_one = put_one
        self._ids = RandomIdGenerator()

    def sample(self, parent: TraceParent | None) -> TraceParent | None:
        if parent is None:
            trace, flags = self._ids.generate_trace_id(), SAMPLED | RANDOM
        else:
            trace, flags = parent.trace, SAMPLED | (parent.flags & RANDOM)
        if parent is not None and self._heeds_parent:
            is_sampled = parent.is_sampled
        else:
            is_sampled = trace & _RANDOM_BITS < self._bound
        return TraceParent(trace, self._ids.generate_span_id(), flags) if is_sampled else None

    def put(self, span: EndedSpan) -> None:
        trace, _, flags = span.own
        for child in span.told.children:
            own = TraceParent(trace, self._ids.generate_span_id(), flags)
            self.put(EndedSpan(own, span.own, False, span.state, child))
        self._put_one(span)
