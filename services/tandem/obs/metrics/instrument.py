"""What one metric is called, counts and tells apart, as a frozen value; never holds a figure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A COUNTER only grows. A GAUGE is read from its owner when somebody asks."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric in OpenTelemetry's terms: `name` with dots, `unit` as UCUM writes it, `attributes` in the order in which
    their values are given. `bounds` are the upper ends of a histogram's buckets, ascending, in the unit."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def counter(name: str, unit: str, meaning: str, *attributes: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, unit, meaning, attributes)


def gauge(name: str, unit: str, meaning: str, *attributes: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, unit, meaning, attributes)


def histogram(name: str, unit: str, meaning: str, bounds: tuple[float, ...], *attributes: str) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, unit, meaning, attributes, bounds)
