"""Describe one metric: its name, kind, unit and attributes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kind of a metric: a COUNTER only grows, a GAUGE is read at each collection, a HISTOGRAM counts values by
    bucket."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """Describe one metric in OpenTelemetry's terms.

    `name`: its name, with dots between the parts. `unit`: in UCUM notation, such as `s`, `By` or `{token}`.
    `description`: the help text. `attributes`: the names of its attributes, in the order in which values are given.
    `bounds`: the upper bounds of a histogram's buckets in `unit`, ascending; empty for other kinds."""

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def counter(name: str, unit: str, description: str, attributes: tuple[str, ...] = ()) -> Instrument:
    return Instrument(name, Kind.COUNTER, unit, description, attributes)


def gauge(name: str, unit: str, description: str, attributes: tuple[str, ...] = ()) -> Instrument:
    return Instrument(name, Kind.GAUGE, unit, description, attributes)


def histogram(
    name: str, unit: str, description: str, bounds: tuple[float, ...], attributes: tuple[str, ...] = ()
) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, unit, description, attributes, bounds)
