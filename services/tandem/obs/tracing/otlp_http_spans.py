"""Export spans over OTLP/HTTP with OpenTelemetry's exporter and our encoder."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.tracing.otlp_spans import SpanEncoder
from tandem.obs.tracing.tracing import EndedSpan


class HttpSpanExporter(OTLPSpanExporter):
    """Export spans that are encoded already, as `SpanEncoder` does it, instead of the SDK's spans."""

    def __init__(self, encoder: SpanEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def pack(self, span: EndedSpan) -> bytes | None:
        return self._encoder.encode(span)

    def export(self, spans: Sequence[bytes]) -> SpanExportResult:  # type: ignore[override]
        reply = self._client.export(self._encoder.request(spans))
        return SpanExportResult.SUCCESS if reply.success else SpanExportResult.FAILURE
