"""Export metrics at intervals from a thread, so that no request waits for it.

This is a periodic exporting metric reader in OpenTelemetry's terms. A message that cannot be sent is dropped: the next
one has everything, because values are sums since the start. The SDK's own instruments are not used, because they cannot
export a histogram that is counted outside of the SDK."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from threading import Event, Thread

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tandem.core.clock import wall_ns
from tandem.obs.metrics.instrument import Kind
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily, Metrics

_log = logging.getLogger(__name__)
_SCOPE = InstrumentationScope("tandem")
_NO_SPAN = 0
"""Span id of exemplars, which know their trace only: the encoder omits a trace without a span, and 0 is no span's
id."""


class MetricSender:
    """Collect `metrics` every `interval_s` seconds and send them through each of `exporters`, from a thread that starts
    immediately.

    `resource` describes this process to the receiver. To end it, call `stop`, then `join`.
    """

    def __init__(
        self, metrics: Metrics, resource: Resource, exporters: Sequence[MetricExporter], interval_s: float
    ) -> None:
        self._metrics = metrics
        self._resource = resource
        self._exporters = exporters
        self._interval_s = interval_s
        self._started_ns = wall_ns()
        self._is_stopping = Event()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="telemetry-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread send the metrics once more and end; does not block. Call `join` afterwards."""
        self._is_stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the last metrics were sent, at most `timeout_s` seconds, and then shut the exporters down. Logs a
        warning where the time was too short."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last metrics could not be sent within the %.1f s that a stop may take", timeout_s)
        if not self._is_closed:
            self._is_closed = True
            for exporter in self._exporters:
                exporter.shutdown()

    def _run(self) -> None:
        while not self._is_stopping.wait(self._interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            families, now_ns = self._metrics.collect(), wall_ns()
            metrics = [_metric(family, self._started_ns, now_ns) for family in families]
            data = MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(_SCOPE, metrics, "")], "")])
            for exporter in self._exporters:
                if not self._is_closed:
                    exporter.export(data)
        except Exception:
            _log.warning("metrics could not be sent; the next attempt sends their values again", exc_info=True)


def _metric(family: MetricFamily, started_ns: int, now_ns: int) -> Metric:
    """Convert one metric for the exporters of OpenTelemetry's SDK. Counters and histograms are sums from `started_ns`
    to `now_ns`, both in nanoseconds since the epoch."""
    instrument = family.instrument
    numbers, histograms = [], []
    for values, point in family.points.items():
        attributes = dict(zip(instrument.attributes, values, strict=True))
        if isinstance(point, HistogramSnapshot):
            histograms.append(_histogram_point(attributes, point, instrument.bounds, started_ns, now_ns))
        else:
            numbers.append(NumberDataPoint(attributes, started_ns, now_ns, point))
    data: Sum | Gauge | Histogram
    match instrument.kind:
        case Kind.COUNTER:
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        case Kind.GAUGE:
            data = Gauge(numbers)
        case Kind.HISTOGRAM:
            data = Histogram(histograms, AggregationTemporality.CUMULATIVE)
    return Metric(instrument.name, instrument.description, instrument.unit, data)


def _histogram_point(
    attributes: Mapping[str, str], snapshot: HistogramSnapshot, bounds: tuple[float, ...], started_ns: int, now_ns: int
) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=started_ns,
        time_unix_nano=now_ns,
        count=snapshot.count,
        sum=snapshot.sum,
        bucket_counts=snapshot.counts,
        explicit_bounds=bounds,
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and not recorded
        max=None,  # type: ignore[arg-type]
        exemplars=[
            SdkExemplar({}, float(value), round(at * 1e9), _NO_SPAN, int(trace, 16))
            for value, trace, at in snapshot.exemplars.values()
        ],
    )
