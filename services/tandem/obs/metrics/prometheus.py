"""Writes what was counted in the two formats of Prometheus; never counts, and never decides what there is to tell.

Text 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/) is what everything reads; OpenMetrics 1.0
(https://prometheus.io/docs/specs/om/open_metrics_spec/) has exemplars besides. Names are translated as OpenTelemetry
says (https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/).
"""

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
_MAX_KEPT = 1024
"""Of what scrapes find again and again: there are some hundred instruments, and fewer attributes and sets of bounds."""
_OPENMETRICS_VERSIONS = ("", "1.0.0", "0.0.1")


@dataclass(frozen=True, slots=True)
class Exposed:
    """A family under the name that Prometheus has for it, a counter's without `_total`. `unit` is empty or how the name
    ends. `labels` are the names of what `points` are told apart by."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    points: Mapping[Values, float | HistogramSnapshot]


def exposed(family: MetricFamily) -> Exposed:
    instrument = family.instrument
    name, unit = _name_and_unit(instrument)
    labels = tuple(_clean(attribute) for attribute in instrument.attributes)
    return Exposed(name, instrument.kind, unit, instrument.meaning, labels, instrument.bounds, family.points)


def prometheus_name(instrument: Instrument) -> str:
    """What queries call it; of a histogram without `_bucket`, `_sum` and `_count`."""
    name, _ = _name_and_unit(instrument)
    return f"{name}_total" if instrument.kind is Kind.COUNTER else name


def is_openmetrics(accept: str) -> bool:
    """Whether an Accept header would rather have OpenMetrics than text (RFC 9110, 12.5.1)."""
    weights = {"open": 0.0, "text": 0.0}
    for part in accept.split(","):
        kind, *rest = (piece.strip() for piece in part.lower().split(";"))
        told = dict(piece.partition("=")[::2] for piece in rest)
        try:
            weight = float(told.get("q", "1"))
        except ValueError:
            continue
        if kind == _OPENMETRICS and told.get("version", "") in _OPENMETRICS_VERSIONS:
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


@lru_cache(_MAX_KEPT)
def _name_and_unit(instrument: Instrument) -> tuple[str, str]:
    """A unit in braces only says what is counted."""
    name = _clean(instrument.name)
    unit = _UNITS.get(instrument.unit, "")
    if instrument.unit == "1" and instrument.kind is Kind.GAUGE:
        unit = "ratio"
    assert unit or not instrument.unit.strip("1") or instrument.unit.startswith("{"), instrument
    return (name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"), unit


@lru_cache(_MAX_KEPT)
def _clean(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _family(family: Exposed, openmetrics: bool) -> list[str]:
    sample = f"{family.name}_total" if family.kind is Kind.COUNTER else family.name
    told = family.name if openmetrics else sample
    lines = [
        f"# HELP {told} {_escaped(family.meaning, quotes=openmetrics)}",
        f"# TYPE {told} {family.kind.value}",
    ]
    if openmetrics and family.unit:
        lines.append(f"# UNIT {told} {family.unit}")
    for values, point in family.points.items():
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(family.labels, values, strict=True))
        if isinstance(point, HistogramSnapshot):
            lines += _spread(family, labels, point, openmetrics)
        else:
            lines.append(f"{sample}{{{labels}}} {_number(point)}" if labels else f"{sample} {_number(point)}")
    return lines


def _spread(family: Exposed, labels: str, spread: HistogramSnapshot, exemplars: bool) -> list[str]:
    start = f"{family.name}_bucket{{{labels}{',' if labels else ''}"
    upto = list(accumulate(spread.counts))
    lines = [f"{start}{bound} {count}" for bound, count in zip(_bound_labels(family.bounds), upto, strict=True)]
    for place, exemplar in spread.exemplars.items() if exemplars else ():
        lines[place] += _exemplar(exemplar)
    end = f"{{{labels}}}" if labels else ""
    return [*lines, f"{family.name}_sum{end} {_number(spread.sum)}", f"{family.name}_count{end} {upto[-1]}"]


@lru_cache(_MAX_KEPT)
def _bound_labels(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """The last of each bucket's labels, with the brace behind it."""
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
