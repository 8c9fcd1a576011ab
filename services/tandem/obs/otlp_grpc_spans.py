"""OpenTelemetry's exporter of spans over gRPC with our encoder of them; never decides when to send."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.otlp_spans import SpanEncoder
from tandem.obs.tracing import EndedSpan


class GrpcSpanExporter(OTLPSpanExporter):
    """Of our spans, not of the SDK's."""

    def __init__(self, encoder: SpanEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def export(self, spans: Sequence[EndedSpan]) -> SpanExportResult:  # type: ignore[override]
        return self._export(spans)  # type: ignore[arg-type]

    def _translate_data(self, data: Sequence[EndedSpan]) -> ExportTraceServiceRequest:  # type: ignore[override]
        return self._encoder.encode(data)
