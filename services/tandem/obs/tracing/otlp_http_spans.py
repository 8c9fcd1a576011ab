"""OpenTelemetry's exporter of spans over HTTP with our encoder of them; never decides when to send."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.tracing.otlp_spans import SpanEncoder
from tandem.obs.tracing.tracing import EndedSpan


class HttpSpanExporter(OTLPSpanExporter):
    """Of our spans, not of the SDK's."""

    def __init__(self, encoder: SpanEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def packed(self, span: EndedSpan) -> bytes | None:
        return self._encoder.encode(span)

    def export(self, spans: Sequence[bytes]) -> SpanExportResult:  # type: ignore[override]
        sent = self._client.export(self._encoder.request(spans))
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE
