"""Count the metrics of one process.

Made for hot paths: counting per token costs a list access, where an OpenTelemetry record costs fifteen times that. One
thread at a time may write a series; any thread may collect.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from tandem.obs.metrics.instrument import Instrument, Kind

OTHER = "other"
"""Attribute value that stands for all values beyond `max_values`."""
OPEN_ATTRIBUTES = frozenset({"tenant", "worker", "source", "gen_ai.request.model"})
"""Attributes whose values clients or operators choose, in any number; the values of all others are enumerations."""

S = TypeVar("S")
Values = tuple[str, ...]
"""Values of an instrument's attributes, in the order of `Instrument.attributes`."""


class Exemplar(NamedTuple):
    """Describe one recorded value of a histogram bucket, with the hexadecimal id of the trace in which it occurred.

    `at`: seconds since the epoch.
    """

    value: float
    trace: str
    at: float


class CounterSeries:
    """Hold the value of one series of a counter, that is of one combination of attribute values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class HistogramSeries:
    """Count the values of one series of a histogram, that is of one combination of attribute values.

    `counts`: the number of values in each bucket; the last bucket is for values above the last bound. `sum`: the sum of
    all values. `exemplars`: the last traced value of each bucket, by the index of the bucket."""

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """Last exemplar of each bucket."""

    def record(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def record_sorted(self, values: Sequence[float]) -> None:
        """Count many values, which must be in ascending order; cheaper than a `record` for each."""
        if not values:
            return
        counts, bounds, below = self.counts, self._bounds, 0
        first, last = bisect_left(bounds, values[0]), bisect_left(bounds, values[-1])
        for bucket in range(first, last):
            upto = bisect_right(values, bounds[bucket])
            counts[bucket] += upto - below
            below = upto
        counts[last] += len(values) - below
        self.sum += sum(values)

    def record_traced(self, value: float, trace: str, at: float) -> None:
        """Count one value as `record` does, and keep it as its bucket's exemplar.

        `trace`: hexadecimal id of its trace; empty: the value is only counted. `at`: seconds since the epoch.
        """
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace:
            self.exemplars[bucket] = Exemplar(value, trace, at)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Copy of one histogram series, with the fields of `HistogramSeries`."""

    counts: tuple[int, ...]
    sum: float
    exemplars: Mapping[int, Exemplar]

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Hold the current values of all series of one metric.

    `points`: the value of each series, by attribute values: a HistogramSnapshot for a histogram, else a number.
    """

    instrument: Instrument
    points: Mapping[Values, float | HistogramSnapshot]


class _Metric(Generic[S]):
    """Own the series of an instrument, one for each combination of attribute values."""

    def __init__(
        self, instrument: Instrument, bounded: Callable[[Instrument, Values], Values], new: Callable[[], S]
    ) -> None:
        self.instrument = instrument
        self._bounded = bounded
        self._new = new
        self._series: dict[Values, S] = {}

    def of(self, *values: str) -> S:
        """Return the series with these attribute values, which are given in the order of `Instrument.attributes`, and
        create it if there is none. Code that counts often keeps the returned series."""
        series = self._series.get(values)
        if series is None:
            series = self._series.setdefault(self._bounded(self.instrument, values), self._new())
        return series


class Counter(_Metric[CounterSeries]):
    """Count one metric that only grows, with one series for each combination of attribute values."""

    def add(self, amount: float, *values: str) -> None:
        """Add `amount` to the series of these attribute values."""
        self.of(*values).value += amount

    def family(self) -> MetricFamily:
        """Return a copy of all series."""
        return MetricFamily(self.instrument, {values: series.value for values, series in self._series.copy().items()})


class Histogram(_Metric[HistogramSeries]):
    """Record the values of one metric by bucket, with one series (`of`) for each combination of attribute values."""

    def family(self) -> MetricFamily:
        """Return a copy of all series."""
        points = {
            values: HistogramSnapshot(tuple(series.counts), series.sum, series.exemplars.copy())
            for values, series in self._series.copy().items()
        }
        return MetricFamily(self.instrument, points)


class Metrics:
    """Register the metrics of one process and collect their values.

    Clients and operators choose the values of some attributes (`OPEN_ATTRIBUTES`). The first `max_values` values of
    such an attribute have series of their own; later ones are counted together as `OTHER`, so that clients cannot
    create any number of series.
    """

    def __init__(self, max_values: int = 100) -> None:
        self._max_values = max_values
        self._known: dict[str, set[str]] = {}
        self._families: dict[str, Callable[[], MetricFamily]] = {}

    def counter(self, instrument: Instrument) -> Counter:
        """Register a counter and return it. Raises ValueError for a name that is registered already."""
        assert instrument.kind is Kind.COUNTER, instrument
        metric = Counter(instrument, self._bounded, CounterSeries)
        if not instrument.attributes:
            metric.of()  # export 0 from the start: rate() misses the first increment of a series that begins at 1
        self._add(instrument, metric.family)
        return metric

    def histogram(self, instrument: Instrument) -> Histogram:
        """Register a histogram and return it. Raises ValueError for a name that is registered already."""
        assert instrument.kind is Kind.HISTOGRAM, instrument
        metric = Histogram(instrument, self._bounded, lambda: HistogramSeries(instrument.bounds))
        self._add(instrument, metric.family)
        return metric

    def watch(self, instrument: Instrument, read: Callable[[], Mapping[Values, float]]) -> None:
        """Register a gauge, or a counter that is counted elsewhere, whose values are read at each collection.

        `read` returns the values by attribute values, and may be called on any thread. Raises ValueError for a name
        that is registered already.
        """
        self._add(instrument, lambda: MetricFamily(instrument, self._merged(instrument, read())))

    def collect(self) -> list[MetricFamily]:
        """Return a copy of all metrics that have a series, in the order in which they were registered."""
        families = (family() for family in list(self._families.values()))
        return [family for family in families if family.points]

    def _add(self, instrument: Instrument, family: Callable[[], MetricFamily]) -> None:
        if instrument.name in self._families:
            raise ValueError(f"{instrument.name} is counted twice")
        self._families[instrument.name] = family

    def _merged(self, instrument: Instrument, points: Mapping[Values, float]) -> Mapping[Values, float]:
        merged: dict[Values, float] = {}
        for values, value in points.items():
            bounded = self._bounded(instrument, values)
            merged[bounded] = merged.get(bounded, 0) + value
        return merged

    def _bounded(self, instrument: Instrument, values: Values) -> Values:
        assert len(values) == len(instrument.attributes), (instrument, values)
        return tuple(map(self._bounded_value, instrument.attributes, values))

    def _bounded_value(self, attribute: str, value: str) -> str:
        if attribute not in OPEN_ATTRIBUTES:
            return value
        known = self._known.setdefault(attribute, set())
        if value not in known and len(known) >= self._max_values:
            return OTHER
        known.add(value)
        return value


def total(points: Iterable[float | HistogramSnapshot]) -> float:
    """Return the sum of `points`, the values of all series of one metric. A histogram counts with the number of its
    values."""
    return sum(point.count if isinstance(point, HistogramSnapshot) else point for point in points)
