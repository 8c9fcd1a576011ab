"""Expose metrics to Prometheus through its client library.

Names are translated as OpenTelemetry specifies
(https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from tandem.obs.metrics.instrument import Instrument, Kind
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily, Metrics
from tandem.obs.metrics.vllm_metrics import vllm_aliases

_UNITS = {"s": "seconds", "By": "bytes"}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_:]+|__+")
_FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}
_MAX_CACHED = 1024
"""Cache entries: there are some hundred instruments, and fewer sets of bounds."""


class PrometheusCollector(Collector):
    """Convert the metrics of a process for Prometheus. Metrics that vLLM has as well are exposed twice, the second time
    under vLLM's names."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, converted to the types of Prometheus's client library."""
        families = self._metrics.collect()
        yield from map(to_prometheus, [*families, *vllm_aliases(families)])

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Return content type and body of `/metrics` in the format that the value `accept` of the Accept header
        prefers: OpenMetrics or Prometheus text."""
        _, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # All names are legal without escaping. Any other choice replaces the colon of vLLM's names in samples.
            body: bytes = openmetrics.generate_latest(self, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return openmetrics.CONTENT_TYPE_LATEST, body
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self)


def to_prometheus(family: MetricFamily) -> Metric:
    """Convert one metric with all its series to the type of Prometheus's client library."""
    instrument = family.instrument
    name, unit = _name_and_unit(instrument)
    labels = [_clean(attribute) for attribute in instrument.attributes]
    metric: Metric = _FAMILIES[instrument.kind](name, instrument.description, labels=labels, unit=unit)
    for values, point in family.points.items():
        if isinstance(metric, HistogramMetricFamily) and isinstance(point, HistogramSnapshot):
            metric.add_metric(values, _buckets(instrument.bounds, point), point.sum)
        elif isinstance(metric, CounterMetricFamily | GaugeMetricFamily) and not isinstance(point, HistogramSnapshot):
            metric.add_metric(values, point)
    return metric


def prometheus_name(instrument: Instrument) -> str:
    """Return the name of a metric in Prometheus queries: a counter's with `_total`, a histogram's without `_bucket`,
    `_sum` or `_count`."""
    name, _ = _name_and_unit(instrument)
    return f"{name}_total" if instrument.kind is Kind.COUNTER else name


@lru_cache(_MAX_CACHED)
def _name_and_unit(instrument: Instrument) -> tuple[str, str]:
    """Return the instrument's name and unit in Prometheus. A unit in braces describes what is counted and is no
    suffix."""
    name = _clean(instrument.name)
    unit = _UNITS.get(instrument.unit, "")
    if instrument.unit == "1" and instrument.kind is Kind.GAUGE:
        unit = "ratio"
    assert unit or not instrument.unit.strip("1") or instrument.unit.startswith("{"), instrument
    return (name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"), unit


@lru_cache(_MAX_CACHED)
def _clean(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _buckets(
    bounds: tuple[float, ...], snapshot: HistogramSnapshot
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the cumulative count up to each bound, with the bucket's exemplar where it has one."""
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
        *zip(_bound_labels(bounds), accumulate(snapshot.counts), strict=True)
    ]
    for index, (value, trace, at) in snapshot.exemplars.items():
        bound, count, *_ = buckets[index]
        buckets[index] = bound, count, Exemplar({"trace_id": trace}, value, at)
    return buckets


@lru_cache(_MAX_CACHED)
def _bound_labels(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(floatToGoString(bound) for bound in (*bounds, math.inf))  # type: ignore[no-untyped-call]
