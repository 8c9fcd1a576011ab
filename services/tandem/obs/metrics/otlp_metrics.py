"""Says in OpenTelemetry's data model what was counted; never counts or sends it.

The SDK cannot observe histograms that somebody else counts, so the values that its exporters take are made here.
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
from tandem.obs.metrics.metrics import Exemplar, HistogramSnapshot, MetricFamily, Values

_SCOPE = InstrumentationScope("tandem")
_NO_SPAN = 0
"""An exemplar knows its trace only, and the encoder leaves out a trace without a span; zeros are no span's id."""


def metrics_data(resource: Resource, families: Iterable[MetricFamily], began_ns: int, now_ns: int) -> MetricsData:
    """Cumulative since `began_ns`; both are nanoseconds since the epoch."""
    metrics = [_metric(family, began_ns, now_ns) for family in families]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(_SCOPE, metrics, "")], "")])


def _metric(family: MetricFamily, began_ns: int, now_ns: int) -> Metric:
    instrument = family.instrument
    numbers, spreads = [], []
    for values, point in family.points.items():
        attributes = _attributes(instrument.attributes, values)
        if isinstance(point, HistogramSnapshot):
            spreads.append(_spread(attributes, point, instrument.bounds, began_ns, now_ns))
        else:
            numbers.append(NumberDataPoint(attributes, began_ns, now_ns, point))
    told: Sum | Gauge | Histogram
    match instrument.kind:
        case Kind.COUNTER:
            told = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        case Kind.GAUGE:
            told = Gauge(numbers)
        case Kind.HISTOGRAM:
            told = Histogram(spreads, AggregationTemporality.CUMULATIVE)
    return Metric(instrument.name, instrument.meaning, instrument.unit, told)


def _spread(
    attributes: Mapping[str, str], spread: HistogramSnapshot, bounds: tuple[float, ...], began_ns: int, now_ns: int
) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=spread.count,
        sum=spread.sum,
        bucket_counts=spread.counts,
        explicit_bounds=bounds,
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and nobody keeps them
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(each) for each in spread.exemplars.values()],
    )


def _exemplar(exemplar: Exemplar) -> SdkExemplar:
    at_ns = round(exemplar.at * 1e9)
    return SdkExemplar({}, float(exemplar.value), at_ns, _NO_SPAN, int(exemplar.trace, 16))


def _attributes(names: tuple[str, ...], values: Values) -> Mapping[str, str]:
    return dict(zip(names, values, strict=True))
