"""Provide an SDK tracer that keeps its spans in memory."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler


class Traced:
    """Tracer of one process with the spans that it ended. Without a `sampler` the variables choose one, as in a
    program."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def by_name(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.spans()}
