"""Describe one metric: its name, kind, unit and attributes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kind of a metric. A COUNTER only grows; a GAUGE is read from its owner at each collection."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """Metric in OpenTelemetry's terms.

    `name` has dots, `unit` is in UCUM notation, `attributes` are in the order in which their values are given. `bounds`
    are the upper bounds of a histogram's buckets, ascending, in the unit. `description` is the help text."""

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def counter(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, unit, description, attributes)


def gauge(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, unit, description, attributes)


def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...], *attributes: str) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, unit, description, attributes, bounds)
