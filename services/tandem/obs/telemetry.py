"""Set up and close everything that one process sends out: its metrics, its traces, and the threads that send them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from tandem.core.clock import SystemClock
from tandem.obs.logs.logging_setup import watch_dropped
from tandem.obs.metrics.instruments import SPANS_DROPPED
from tandem.obs.metrics.metrics import Metrics
from tandem.obs.metrics.process_metrics import watch_process
from tandem.obs.metrics.prometheus import PrometheusCollector
from tandem.obs.otel_settings import read_otel
from tandem.obs.tracing import OFF

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Tracer

    from tandem.obs.metrics.metric_exporter import MetricSender
    from tandem.obs.span_pipeline import SpanPipeline


class Telemetry:
    """Hold the metrics and the tracer of one process, and send both until `close`.

    `metrics`: the metrics that the process counts. `exposition`: function that returns content type and body of
    `/metrics` for the value of an Accept header. `tracer`: creates spans, which are lost where no span exporter is
    configured."""

    def __init__(
        self, metrics: Metrics, spans: SpanPipeline | None = None, metric_sender: MetricSender | None = None
    ) -> None:
        self.metrics = metrics
        self.exposition = PrometheusCollector(metrics).exposition
        self.tracer: Tracer = OFF if spans is None else spans.tracer
        self._spans = spans
        self._metric_sender = metric_sender
        metrics.watch(SPANS_DROPPED, lambda: {(): 0 if spans is None else spans.num_dropped})

    @classmethod
    def start(cls, service: str, instance: str, max_values: int) -> Self:
        """Set up metrics, spans and their exporters from the `OTEL_*` variables, and return them as one `Telemetry`.

        `service` is the program's name, and `instance` distinguishes processes of that program; `OTEL_SERVICE_NAME` and
        `OTEL_RESOURCE_ATTRIBUTES` have precedence over both. `max_values`: how many values of an open attribute have
        series of their own (see `Metrics`). Raises TandemError(INVALID_REQUEST) naming a variable with an invalid
        value.
        """
        _forget_empty_variables()
        settings = read_otel(os.environ)
        metrics = Metrics(max_values)
        watch_process(metrics)
        watch_dropped(metrics)
        if not settings.traces and not settings.metrics:
            return cls(metrics)
        resource = _resource(service, instance)
        spans = metric_sender = None
        if settings.traces:
            from tandem.obs.exporters import span_exporters
            from tandem.obs.span_pipeline import SpanPipeline

            spans = SpanPipeline(span_exporters(settings), resource, settings.max_spans)
        if settings.metrics:
            from tandem.obs.exporters import metric_exporters
            from tandem.obs.metrics.metric_exporter import MetricSender

            metric_sender = MetricSender(metrics, resource, metric_exporters(settings), settings.metrics_interval_s)
        return cls(metrics, spans, metric_sender)

    def close(self, timeout_s: float) -> None:
        """Send the metrics and spans that have not been sent, and return when that is done or after `timeout_s`
        seconds. Blocks."""
        end = SystemClock.now() + timeout_s
        if self._metric_sender is not None:
            self._metric_sender.stop()
        if self._spans is not None:
            self._spans.close(timeout_s)
        if self._metric_sender is not None:
            self._metric_sender.join(max(0.0, end - SystemClock.now()))


def _forget_empty_variables() -> None:
    """Unset empty `OTEL_*` variables: the standard treats them as unset, but not all of the SDK's code does."""
    for name in [name for name, value in os.environ.items() if name.startswith("OTEL_") and not value.strip()]:
        del os.environ[name]


def _resource(service: str, instance: str) -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    detected = OTELResourceDetector().detect().attributes
    own = {"service.name": service, "service.instance.id": instance}
    return Resource.create({name: value for name, value in own.items() if name not in detected})
