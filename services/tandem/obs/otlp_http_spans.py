"""OpenTelemetry's exporter of spans over HTTP with our encoder of them; never decides when to send."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.otlp_spans import SpanEncoder
from tandem.obs.tracing import EndedSpan


class HttpSpanExporter(OTLPSpanExporter):
    """Of our spans, not of the SDK's."""

    def __init__(self, encoder: SpanEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def export(self, spans: Sequence[EndedSpan]) -> SpanExportResult:  # type: ignore[override]
        sent = self._client.export(self._encoder.encode(spans))
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE
