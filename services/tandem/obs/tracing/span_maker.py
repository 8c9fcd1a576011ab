"""Decide which traces are sampled, and give ended spans their ids.

OpenTelemetry's tracer is not used: its spans, which can be open and modified from anywhere, cost thirty microseconds
each. Nor are its samplers, which every request would have to ask; `SpanMaker` decides the same."""

from __future__ import annotations

from collections.abc import Callable
from os import urandom

from tandem.obs.otel_settings import TraceSampling
from tandem.obs.tracing.trace_context import RANDOM, SAMPLED, TraceParent
from tandem.obs.tracing.tracing import EndedSpan

_TRACE_BYTES, _SPAN_BYTES = 16, 8
"""Lengths of ids. All zeros are not a valid id, but occur once in 2**64 random ones."""
_TRACE_DIGITS, _SPAN_DIGITS = 2 * _TRACE_BYTES, 2 * _SPAN_BYTES
_RANDOM_BYTES = 8
"""Last bytes of a trace id, from which all programs of a trace derive the same sampling decision."""


class SpanMaker:
    """Implement `Spans` for one process.

    `emit` gets each ended span, children before their parent. `random_bytes` returns that many random bytes."""

    def __init__(
        self, sampling: TraceSampling, emit: Callable[[EndedSpan], None], random_bytes: Callable[[int], bytes] = urandom
    ) -> None:
        self._is_parent_based = sampling.is_parent_based
        self._bound = round(sampling.ratio * 256**_RANDOM_BYTES)
        self._emit = emit
        self._random_bytes = random_bytes

    def sample(self, parent: TraceParent | None) -> TraceParent | None:
        if parent is None:
            random_hex = self._random_bytes(_TRACE_BYTES + _SPAN_BYTES).hex()
            trace, span, flags = random_hex[:_TRACE_DIGITS], random_hex[_TRACE_DIGITS:], SAMPLED | RANDOM
        else:
            trace, span, flags = parent.trace, "", SAMPLED | (parent.flags & RANDOM)
        if parent is not None and self._is_parent_based:
            is_sampled = parent.is_sampled
        else:
            is_sampled = int(trace[-2 * _RANDOM_BYTES :], 16) < self._bound
        return TraceParent(trace, span or self._random_bytes(_SPAN_BYTES).hex(), flags) if is_sampled else None

    def put(self, span: EndedSpan) -> None:
        (trace, _, flags), children = span.own, span.record.children
        random_hex = self._random_bytes(_SPAN_BYTES * len(children)).hex() if children else ""
        for index, child in enumerate(children):
            own = random_hex[_SPAN_DIGITS * index : _SPAN_DIGITS * (index + 1)]
            self.put(EndedSpan(TraceParent(trace, own, flags), span.own, False, span.state, child))
        self._emit(span)
