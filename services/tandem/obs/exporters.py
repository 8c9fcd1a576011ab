"""Create OpenTelemetry's standard exporters as the `OTEL_*` variables select them.

Only programs that send something import this module, and only the exporters of the chosen protocol: their packages
take 0.2 s to import. The exporters read endpoints and headers from `os.environ` themselves."""

from __future__ import annotations

import logging

from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from tandem.obs.otel_settings import OtelSettings, Protocol

MAX_BATCH = 2000
"""Series per message: with twenty buckets each, a message stays below the 4 MiB that a gRPC server accepts."""
_QUIET_S = 60.0
"""Between two records of one kind."""
NOISY_EXPORTERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
"""Loggers that write several lines for each message that cannot be sent."""


class RateLimitFilter(logging.Filter):
    """Pass one record per minute of each logger, message and thread; each signal is sent by a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[tuple[str, str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(record.msg), str(record.threadName)
        if record.created - self._passed_at.get(kind, -_QUIET_S) < _QUIET_S:
            return False
        self._passed_at[kind] = record.created
        return True


_rate_limit = RateLimitFilter()


def span_exporters(settings: OtelSettings) -> list[SpanExporter]:
    protocol = settings.traces_protocol
    return [_otlp_spans(protocol) if name == "otlp" else ConsoleSpanExporter() for name in settings.traces]


def metric_exporters(settings: OtelSettings) -> list[MetricExporter]:
    return [_otlp_metrics(settings) if name == "otlp" else ConsoleMetricExporter() for name in settings.metrics]


def _otlp_spans(protocol: Protocol) -> SpanExporter:
    _limit_exporter_logs()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

        return GrpcSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

    return HttpSpanExporter()


def _otlp_metrics(settings: OtelSettings) -> MetricExporter:
    _limit_exporter_logs()
    timeout_s = settings.metrics_timeout_s
    if settings.metrics_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

        return GrpcMetricExporter(timeout=timeout_s, max_export_batch_size=MAX_BATCH)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter

    return HttpMetricExporter(timeout=timeout_s, max_export_batch_size=MAX_BATCH)


def _limit_exporter_logs() -> None:
    for name in NOISY_EXPORTERS:
        logging.getLogger(name).addFilter(_rate_limit)
