"""Gives spans that are over their place in a trace; never decides what they tell, and never sends them.

Not by OpenTelemetry's tracer: a span that can be open, changed and ended by anybody costs it thirty microseconds, and
ours need none of that. Nor by its samplers, which every request would ask: they decide the same.
"""

from __future__ import annotations

from collections.abc import Callable
from os import urandom

from tandem.obs.otel_settings import TraceSampling
from tandem.obs.tracing.trace_context import RANDOM, SAMPLED, TraceParent
from tandem.obs.tracing.tracing import EndedSpan

_TRACE_BYTES, _SPAN_BYTES = 16, 8
"""All zeros are no id, and come once in 2**64 draws."""
_TRACE_DIGITS, _SPAN_DIGITS = 2 * _TRACE_BYTES, 2 * _SPAN_BYTES
_RANDOM_BYTES = 8
"""Of a trace's id, the last ones, by which all programs of a trace decide alike."""


class SpanMaker:
    """The Spans of one process. `put_one` takes each span, those inside another before it. `draw` gives so many random
    bytes."""

    def __init__(
        self, sampling: TraceSampling, put_one: Callable[[EndedSpan], None], draw: Callable[[int], bytes] = urandom
    ) -> None:
        self._heeds_parent = sampling.heeds_parent
        self._bound = round(sampling.ratio * 256**_RANDOM_BYTES)
        self._put_one = put_one
        self._draw = draw

    def sample(self, parent: TraceParent | None) -> TraceParent | None:
        if parent is None:
            drawn = self._draw(_TRACE_BYTES + _SPAN_BYTES).hex()
            trace, span, flags = drawn[:_TRACE_DIGITS], drawn[_TRACE_DIGITS:], SAMPLED | RANDOM
        else:
            trace, span, flags = parent.trace, "", SAMPLED | (parent.flags & RANDOM)
        if parent is not None and self._heeds_parent:
            is_sampled = parent.is_sampled
        else:
            is_sampled = int(trace[-2 * _RANDOM_BYTES :], 16) < self._bound
        return TraceParent(trace, span or self._draw(_SPAN_BYTES).hex(), flags) if is_sampled else None

    def put(self, span: EndedSpan) -> None:
        (trace, _, flags), children = span.own, span.told.children
        drawn = self._draw(_SPAN_BYTES * len(children)).hex() if children else ""
        for place, child in enumerate(children):
            own = drawn[_SPAN_DIGITS * place : _SPAN_DIGITS * (place + 1)]
            self.put(EndedSpan(TraceParent(trace, own, flags), span.own, False, span.state, child))
        self._put_one(span)
