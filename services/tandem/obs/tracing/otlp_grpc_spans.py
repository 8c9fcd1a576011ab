"""Export spans over OTLP/gRPC with OpenTelemetry's exporter and our encoder."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.tracing.otlp_spans import SpanEncoder
from tandem.obs.tracing.tracing import EndedSpan

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class GrpcSpanExporter(OTLPSpanExporter):
    """Export spans that are encoded already, as `SpanEncoder` does it, instead of the SDK's spans."""

    def __init__(self, encoder: SpanEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def pack(self, span: EndedSpan) -> bytes | None:
        return self._encoder.encode(span)

    def export(self, spans: Sequence[bytes]) -> SpanExportResult:  # type: ignore[override]
        return self._export(spans)  # type: ignore[arg-type]

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        self._client = _BytesStub(self._channel)  # type: ignore[assignment, arg-type]

    def _translate_data(self, data: Sequence[bytes]) -> bytes:  # type: ignore[override]
        return self._encoder.request(data)


class _BytesStub:
    """Send encoded messages, and leave the reply undecoded."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export = channel.unary_unary(_METHOD, None, None)
