"""What leaves one process: its metrics and its traces, and where they go; never counts or traces by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from tandem.obs import otel_environment, prometheus
from tandem.obs.metrics import Metrics
from tandem.obs.tracing import OFF, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from tandem.obs.span_sender import SpanSender


class Telemetry:
    """Pulled: `exposition`. Pushed, by threads of its own until `close`: what OpenTelemetry's variables ask for."""

    def __init__(self, metrics: Metrics, tracing: Tracing = OFF, spans: SpanSender | None = None) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self._spans = spans

    @classmethod
    def start(cls, service: str, instance: str, max_values: int) -> Self:
        """Of the program `service`, told apart from others like it by `instance`; `OTEL_SERVICE_NAME` and
        `OTEL_RESOURCE_ATTRIBUTES` go before both. `max_values`: as `Metrics`' own. TandemError(INVALID_REQUEST) names
        an `OTEL_` variable whose value means nothing."""
        environ = os.environ
        metrics = Metrics(max_values)
        otel_environment.check_resource(environ)
        traced = otel_environment.exporters("traces", environ)
        if not traced:
            return cls(metrics)
        otel_environment.check_traces(environ)
        from tandem.obs.exporters import span_exporters
        from tandem.obs.span_sender import SpanSender

        spans = SpanSender(_resource(service, instance), span_exporters(traced, environ))
        return cls(metrics, Tracing(spans.tracer), spans)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """The content type and the body of `/metrics` for an Accept header."""
        openmetrics = prometheus.is_openmetrics(accept)
        families = [prometheus.exposed(family) for family in self.metrics.collect()]
        content_type = prometheus.OPENMETRICS_TYPE if openmetrics else prometheus.TEXT_TYPE
        return content_type, prometheus.exposition(families, openmetrics=openmetrics)

    def close(self, timeout_s: float) -> None:
        """Sends what there is, and returns when it has gone or the time is over."""
        if self._spans is not None:
            self._spans.close(timeout_s)


def _resource(service: str, instance: str) -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    told = OTELResourceDetector().detect().attributes
    own = {"service.name": service, "service.instance.id": instance}
    return Resource.create({name: value for name, value in own.items() if name not in told})
