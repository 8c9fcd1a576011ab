"""OpenTelemetry's exporter of spans over gRPC with our encoder of them; never decides when to send."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from tandem.obs.otlp_spans import encode_spans


class GrpcSpanExporter(OTLPSpanExporter):
    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encode_spans(data)
