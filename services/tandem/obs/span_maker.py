"""Gives spans that are over their place in a trace; never decides what they tell, and never sends them.

Not by OpenTelemetry's tracer: a span that can be open, changed and ended by anybody costs it thirty microseconds, and
ours need none of that. Nor by its samplers, which every request would ask: they decide the same.
"""

from __future__ import annotations

from collections.abc import Callable
from os import urandom

from tandem.obs.otel_environment import Sampling
from tandem.obs.trace_context import RANDOM, SAMPLED, TraceParent
from tandem.obs.tracing import EndedSpan

_TRACE_BYTES, _SPAN_BYTES = 16, 8
"""All zeros are no id, and come once in 2**64 draws."""
_RANDOM_BYTES = 8
"""Of a trace's id, the last ones, by which all programs of a trace decide alike."""


class SpanMaker:
    """The Spans of one process. `put_one` takes each span, those inside another before it. `draw` gives so many random
    bytes."""

    def __init__(
        self, sampling: Sampling, put_one: Callable[[EndedSpan], None], draw: Callable[[int], bytes] = urandom
    ) -> None:
        self._heeds_parent = sampling.heeds_parent
        self._bound = round(sampling.ratio * 256**_RANDOM_BYTES)
        self._put_one = put_one
        self._draw = draw

    def sample(self, parent: TraceParent | None) -> TraceParent | None:
        if parent is None:
            trace, flags = self._draw(_TRACE_BYTES).hex(), SAMPLED | RANDOM
        else:
            trace, flags = parent.trace, SAMPLED | (parent.flags & RANDOM)
        if parent is not None and self._heeds_parent:
            is_sampled = parent.is_sampled
        else:
            is_sampled = int(trace[-2 * _RANDOM_BYTES :], 16) < self._bound
        return TraceParent(trace, self._span(), flags) if is_sampled else None

    def put(self, span: EndedSpan) -> None:
        trace, _, flags = span.own
        for child in span.told.children:
            self.put(EndedSpan(TraceParent(trace, self._span(), flags), span.own, False, span.state, child))
        self._put_one(span)

    def _span(self) -> str:
        return self._draw(_SPAN_BYTES).hex()
