"""Create OpenTelemetry's standard exporters as the `OTEL_*` variables select them.

Only programs that send something import this module, and only the exporters of the chosen protocol: their packages
take 0.2 s to import. The exporters read endpoints and headers from `os.environ` themselves."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from tandem.obs.otel_settings import OtelSettings, Protocol

_PACKAGES: dict[Protocol, str] = {"grpc": "grpc", "http/protobuf": "http"}
MAX_BATCH = 2000
"""Largest number of series in one message: with twenty buckets each, a message stays below the 4 MiB that a gRPC server
accepts."""
_QUIET_S = 60.0
"""Seconds between two records of one kind."""
NOISY_EXPORTERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
"""Loggers that write several lines for each message that cannot be sent."""


class RateLimitFilter(logging.Filter):
    """Drop repeated log records: of the records with the same logger, message and thread, let one per minute pass."""

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
    """Create and return the span exporters that `settings.traces` names; their packages are imported only now."""
    return [
        _otlp(settings.traces_protocol, "trace_exporter").OTLPSpanExporter()
        if name == "otlp"
        else ConsoleSpanExporter()
        for name in settings.traces
    ]


def metric_exporters(settings: OtelSettings) -> list[MetricExporter]:
    """Create and return the metric exporters that `settings.metrics` names; their packages are imported only now."""
    options = {"timeout": settings.metrics_timeout_s, "max_export_batch_size": MAX_BATCH}
    return [
        _otlp(settings.metrics_protocol, "metric_exporter").OTLPMetricExporter(**options)
        if name == "otlp"
        else ConsoleMetricExporter()
        for name in settings.metrics
    ]


def _otlp(protocol: Protocol, module: str) -> Any:
    """Import and return a module of the OTLP exporters of a protocol, whose logs are limited from then on."""
    for name in NOISY_EXPORTERS:
        logging.getLogger(name).addFilter(_rate_limit)
    return import_module(f"opentelemetry.exporter.otlp.proto.{_PACKAGES[protocol]}.{module}")
