"""Counts what instruments say is to be counted; never names, formats or sends anything.

Made for hot paths: what happens per token costs a list access, and an OpenTelemetry record fifteen times that. One
thread writes a series at a time, any thread collects.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.obs.metrics.instrument import Instrument, Kind

OTHER = "other"
"""What the values of an attribute count as that came after too many others."""
OPEN_ATTRIBUTES = frozenset({"tenant", "worker", "source", "gen_ai.request.model"})
"""Their values come from outside, so there may be any number of them; those of all others are enumerations."""

Values = tuple[str, ...]
"""Of an instrument's attributes, in their order."""


class Exemplar(NamedTuple):
    """One value of a bucket and the trace, in hexadecimal, that it came from. `at`: seconds since the epoch."""

    value: float
    trace: str
    at: float


class CounterSeries:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class HistogramSeries:
    """One series of a histogram. `counts` has one more than there are bounds: what lies above the last."""

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The last one of each bucket."""

    def record(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def record_sorted(self, values: Sequence[float]) -> None:
        """As `record`, for what is gathered first because it comes too often. They rise, so that bounds are looked for
        among values: there are fewer bounds."""
        if not values:
            return
        counts, bounds, below = self.counts, self._bounds, 0
        first, last = bisect_left(bounds, values[0]), bisect_left(bounds, values[-1])
        for place in range(first, last):
            upto = bisect_right(values, bounds[place])
            counts[place] += upto - below
            below = upto
        counts[last] += len(values) - below
        self.sum += sum(values)

    def record_all(self, values: Sequence[float], traces: Sequence[str], at: float) -> None:
        """As `record`, each with its trace, which is shown beside the bucket; empty: it has none."""
        if not any(traces):
            self.record_sorted(sorted(values))
            return
        counts, bounds = self.counts, self._bounds
        shown: dict[int, tuple[float, str]] = {}
        for told in zip(values, traces, strict=True):
            place = bisect_left(bounds, told[0])
            counts[place] += 1
            if told[1]:
                shown[place] = told
        self.sum += sum(values)
        self.exemplars.update((place, Exemplar(*told, at)) for place, told in shown.items())


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram's series as it was when it was looked at."""

    counts: tuple[int, ...]
    sum: float
    exemplars: Mapping[int, Exemplar]

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All series of an instrument; a Spread each where it is a histogram."""

    instrument: Instrument
    points: Mapping[Values, float | HistogramSnapshot]


class Counter:
    def __init__(self, instrument: Instrument, bounded: Callable[[Instrument, Values], Values]) -> None:
        self.instrument = instrument
        self._bounded = bounded
        self._cells: dict[Values, CounterSeries] = {}

    def of(self, *values: str) -> CounterSeries:
        """The series of these attribute values, to be kept by whoever adds to it often."""
        cell = self._cells.get(values)
        if cell is None:
            cell = self._cells.setdefault(self._bounded(self.instrument, values), CounterSeries())
        return cell

    def add(self, amount: float, *values: str) -> None:
        self.of(*values).value += amount

    def family(self) -> MetricFamily:
        return MetricFamily(self.instrument, {values: cell.value for values, cell in self._cells.copy().items()})


class Histogram:
    def __init__(self, instrument: Instrument, bounded: Callable[[Instrument, Values], Values]) -> None:
        self.instrument = instrument
        self._bounded = bounded
        self._series: dict[Values, HistogramSeries] = {}

    def of(self, *values: str) -> HistogramSeries:
        """As `Counter.of`."""
        buckets = self._series.get(values)
        if buckets is None:
            fresh = HistogramSeries(self.instrument.bounds)
            buckets = self._series.setdefault(self._bounded(self.instrument, values), fresh)
        return buckets

    def family(self) -> MetricFamily:
        seen = {
            values: HistogramSnapshot(tuple(series.counts), series.sum, series.exemplars.copy())
            for values, series in self._series.copy().items()
        }
        return MetricFamily(self.instrument, seen)


class Metrics:
    """The metrics of one process. `max_values`: distinct values of each open attribute, beyond which they are told as
    OTHER, so that no client can make series without end."""

    def __init__(self, max_values: int = 100) -> None:
        self._max_values = max_values
        self._known: dict[str, set[str]] = {}
        self._families: dict[str, Callable[[], MetricFamily]] = {}

    def counter(self, instrument: Instrument) -> Counter:
        assert instrument.kind is Kind.COUNTER, instrument
        made = Counter(instrument, self._bounded)
        if not instrument.attributes:
            made.of()  # told as 0 before it first counts: a series that begins with 1 has not grown
        self._add(instrument, made.family)
        return made

    def histogram(self, instrument: Instrument) -> Histogram:
        assert instrument.kind is Kind.HISTOGRAM, instrument
        made = Histogram(instrument, self._bounded)
        self._add(instrument, made.family)
        return made

    def watch(self, instrument: Instrument, read: Callable[[], Mapping[Values, float]]) -> None:
        """A gauge, or a counter whose owner counts by itself: `read` is called at every collection, on any thread."""
        self._add(instrument, lambda: MetricFamily(instrument, self._merged(instrument, read())))

    def collect(self) -> list[MetricFamily]:
        """Those that have a series, in the order in which they were made."""
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
        if OPEN_ATTRIBUTES.isdisjoint(instrument.attributes):
            return values
        return tuple(self._told(name, value) for name, value in zip(instrument.attributes, values, strict=True))

    def _told(self, attribute: str, value: str) -> str:
        if attribute not in OPEN_ATTRIBUTES:
            return value
        known = self._known.setdefault(attribute, set())
        if value not in known and len(known) >= self._max_values:
            return OTHER
        known.add(value)
        return value


def total(points: Iterable[float | HistogramSnapshot]) -> float:
    """Of a family's series; a histogram's number of values."""
    return sum(point.count if isinstance(point, HistogramSnapshot) else point for point in points)
