"""Makes OpenTelemetry's standard exporters as its variables ask for; never exports by itself.

They take a fifth of a second to import, so each is imported where it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.obs.otel_environment import check_otlp, protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def span_exporters(names: Sequence[str], environ: Mapping[str, str]) -> list[SpanExporter]:
    """Of "otlp" and "console". They read `os.environ` themselves."""
    return [_otlp_spans(environ) if name == "otlp" else _console_spans() for name in names]


def _console_spans() -> SpanExporter:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter()


def _otlp_spans(environ: Mapping[str, str]) -> SpanExporter:
    check_otlp("traces", environ)
    if protocol("traces", environ) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

        return GrpcSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

    return HttpSpanExporter()
