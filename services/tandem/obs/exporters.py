"""Makes OpenTelemetry's standard exporters as its variables ask for; never exports by itself.

They take a fifth of a second to import, so each is imported where it is made. They read `os.environ` by themselves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tandem.obs.otel_settings import OtelSettings, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource

    from tandem.obs.tracing.span_sender import SpanExporter

MAX_BATCH = 2000
"""Series in one message: with twenty buckets each they stay below the 4 MiB that a gRPC server takes."""
_QUIET_S = 60.0
LOUD = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
"""They log whatever fails, a few lines for each message, and where a receiver is down every message does."""


class RateLimitFilter(logging.Filter):
    """Of the lines of one place and thread, which sends one signal, one a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._told_at: dict[tuple[str, str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.name, str(record.msg), str(record.threadName)
        if record.created - self._told_at.get(place, -_QUIET_S) < _QUIET_S:
            return False
        self._told_at[place] = record.created
        return True


_sparingly = RateLimitFilter()


def span_exporters(settings: OtelSettings, resource: Resource) -> list[SpanExporter[Any]]:
    protocol = settings.traces_protocol
    return [_otlp_spans(protocol, resource) if name == "otlp" else _console_spans(resource) for name in settings.traces]


def metric_exporters(settings: OtelSettings) -> list[MetricExporter]:
    return [_otlp_metrics(settings) if name == "otlp" else _console_metrics() for name in settings.metrics]


def _console_spans(resource: Resource) -> SpanExporter[Any]:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    from tandem.obs.tracing.readable_spans import ReadableSpans

    return ReadableSpans(ConsoleSpanExporter(), resource)


def _console_metrics() -> MetricExporter:
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    return ConsoleMetricExporter()


def _otlp_spans(protocol: Protocol, resource: Resource) -> SpanExporter[Any]:
    from tandem.obs.tracing.otlp_spans import SpanEncoder

    _log_sparingly()
    if protocol == "grpc":
        from tandem.obs.tracing.otlp_grpc_spans import GrpcSpanExporter

        return GrpcSpanExporter(SpanEncoder(resource))
    from tandem.obs.tracing.otlp_http_spans import HttpSpanExporter

    return HttpSpanExporter(SpanEncoder(resource))


def _otlp_metrics(settings: OtelSettings) -> MetricExporter:
    _log_sparingly()
    timeout_s = settings.metrics_timeout_s
    if settings.metrics_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

        return GrpcMetricExporter(timeout=timeout_s, max_export_batch_size=MAX_BATCH)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter

    return HttpMetricExporter(timeout=timeout_s, max_export_batch_size=MAX_BATCH)


def _log_sparingly() -> None:
    for name in LOUD:
        logging.getLogger(name).addFilter(_sparingly)
