"""OpenTelemetry's exporter of spans over HTTP with our encoder of them; never decides when to send."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.otlp_spans import encode_spans


class HttpSpanExporter(OTLPSpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sent = self._client.export(encode_spans(spans).SerializeToString())
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE
