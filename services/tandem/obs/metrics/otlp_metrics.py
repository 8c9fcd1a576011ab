"""Convert collected metrics to the data model of OpenTelemetry's SDK, which its exporters take.

The SDK's own instruments are not used, because they cannot export a histogram that is counted outside of the SDK.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tandem.obs.metrics.instrument import Kind
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily

_SCOPE = InstrumentationScope("tandem")
_NO_SPAN = 0
"""Span id of exemplars, which know their trace only: the encoder omits a trace without a span, and 0 is no span's
id."""


def metrics_data(resource: Resource, families: Iterable[MetricFamily], started_ns: int, now_ns: int) -> MetricsData:
    """Return the metrics `families` as one message of OpenTelemetry's SDK, for its exporters.

    `resource` describes this process. Counters and histograms are sums from `started_ns` to `now_ns`, both in
    nanoseconds since the epoch.
    """
    metrics = [_metric(family, started_ns, now_ns) for family in families]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(_SCOPE, metrics, "")], "")])


def _metric(family: MetricFamily, started_ns: int, now_ns: int) -> Metric:
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
