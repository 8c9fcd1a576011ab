"""Write metrics in both formats of Prometheus.

Text 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/) is what everything reads; OpenMetrics 1.0
(https://prometheus.io/docs/specs/om/open_metrics_spec/) has exemplars besides. Names are translated as OpenTelemetry
specifies (https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tandem.obs.metrics.instrument import Instrument, Kind
from tandem.obs.metrics.metrics import Exemplar, HistogramSnapshot, MetricFamily, Values

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_UNITS = {"s": "seconds", "By": "bytes"}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+|__+")
_OPENMETRICS = "application/openmetrics-text"
_MAX_CACHED = 1024
"""Cache entries: there are some hundred instruments, and fewer attributes and sets of bounds."""
_OPENMETRICS_VERSIONS = ("", "1.0.0", "0.0.1")


@dataclass(frozen=True, slots=True)
class Exposed:
    """Metric family under its name in Prometheus, for a counter without `_total`.

    `unit` is the name's suffix, or empty. `labels` are the names of the values by which `points` are keyed."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    points: Mapping[Values, float | HistogramSnapshot]


def exposed(family: MetricFamily) -> Exposed:
    instrument = family.instrument
    name, unit = _name_and_unit(instrument)
    labels = tuple(_clean(attribute) for attribute in instrument.attributes)
    return Exposed(name, instrument.kind, unit, instrument.description, labels, instrument.bounds, family.points)


def prometheus_name(instrument: Instrument) -> str:
    """Return the instrument's name in queries; for a histogram without `_bucket`, `_sum` and `_count`."""
    name, _ = _name_and_unit(instrument)
    return f"{name}_total" if instrument.kind is Kind.COUNTER else name


def is_openmetrics(accept: str) -> bool:
    """Return whether an Accept header prefers OpenMetrics to text (RFC 9110, 12.5.1)."""
    weights = {"open": 0.0, "text": 0.0}
    for part in accept.split(","):
        kind, *rest = (piece.strip() for piece in part.lower().split(";"))
        parameters = dict(piece.partition("=")[::2] for piece in rest)
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if kind == _OPENMETRICS and parameters.get("version", "") in _OPENMETRICS_VERSIONS:
            weights["open"] = max(weights["open"], weight)
        elif kind in ("text/plain", "text/*", "*/*"):
            weights["text"] = max(weights["text"], weight)
    return weights["open"] > 0 and weights["open"] >= weights["text"]


def exposition(families: Iterable[Exposed], *, openmetrics: bool) -> bytes:
    lines: list[str] = []
    for family in families:
        lines += _family(family, openmetrics)
    if openmetrics:
        lines.append("# EOF")
    return "\n".join((*lines, "")).encode()


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


def _family(family: Exposed, openmetrics: bool) -> list[str]:
    sample = f"{family.name}_total" if family.kind is Kind.COUNTER else family.name
    header_name = family.name if openmetrics else sample
    lines = [
        f"# HELP {header_name} {_escaped(family.description, quotes=openmetrics)}",
        f"# TYPE {header_name} {family.kind.value}",
    ]
    if openmetrics and family.unit:
        lines.append(f"# UNIT {header_name} {family.unit}")
    for values, point in family.points.items():
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(family.labels, values, strict=True))
        if isinstance(point, HistogramSnapshot):
            lines += _histogram(family, labels, point, openmetrics)
        else:
            lines.append(f"{sample}{{{labels}}} {_number(point)}" if labels else f"{sample} {_number(point)}")
    return lines


def _histogram(family: Exposed, labels: str, snapshot: HistogramSnapshot, exemplars: bool) -> list[str]:
    start = f"{family.name}_bucket{{{labels}{',' if labels else ''}"
    cumulative = list(accumulate(snapshot.counts))
    lines = [f"{start}{bound} {count}" for bound, count in zip(_bound_labels(family.bounds), cumulative, strict=True)]
    for bucket, exemplar in snapshot.exemplars.items() if exemplars else ():
        lines[bucket] += _exemplar(exemplar)
    end = f"{{{labels}}}" if labels else ""
    return [*lines, f"{family.name}_sum{end} {_number(snapshot.sum)}", f"{family.name}_count{end} {cumulative[-1]}"]


@lru_cache(_MAX_CACHED)
def _bound_labels(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the last label of each bucket, with the closing brace."""
    return tuple(f'le="{_number(float(bound))}"}}' for bound in (*bounds, math.inf))


def _exemplar(exemplar: Exemplar) -> str:
    return f' # {{trace_id="{_escaped(exemplar.trace)}"}} {_number(exemplar.value)} {exemplar.at:.3f}'


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
