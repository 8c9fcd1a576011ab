"""Test counters and histograms: series by attributes, buckets by bounds, and a bound on series that clients cause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.obs.metrics.instrument import Instrument, Kind, counter, gauge, histogram
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.metrics import OTHER, Exemplar, HistogramSeries, HistogramSnapshot, Metrics, total

PETS = counter("pets", "{pet}", "Pets.", ("kind", "tenant"))
SPEED = histogram("speed", "s", "Speed.", (1.0, 2.0), ("lane",))


def points(metrics: Metrics, instrument: Instrument) -> dict[tuple[str, ...], float | HistogramSnapshot]:
    return next(dict(family.points) for family in metrics.collect() if family.instrument is instrument)


def test_a_counter_has_a_series_for_each_combination_of_attributes() -> None:
    metrics = Metrics()
    pets = metrics.counter(PETS)
    assert metrics.collect() == []
    pets.add(2, "cat", "acme")
    cell = pets.of("dog", "acme")
    cell.add()
    pets.add(1, "cat", "acme")
    assert points(metrics, PETS) == {("cat", "acme"): 3, ("dog", "acme"): 1}
    assert pets.of("dog", "acme") is cell


def test_a_counter_without_attributes_is_exported_as_zero_before_its_first_count() -> None:
    """Without the zero, `rate()` would not see the first count as growth."""
    metrics = Metrics()
    visits = counter("visits", "{visit}", "Visits.")
    metrics.counter(visits)
    metrics.counter(PETS)
    assert [(family.instrument, family.points) for family in metrics.collect()] == [(visits, {(): 0})]


def test_a_value_on_a_bound_is_in_the_bucket_below_it() -> None:
    metrics = Metrics()
    speed = metrics.histogram(SPEED).of("batch")
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        speed.record(value)
    assert points(metrics, SPEED) == {("batch",): HistogramSnapshot((2, 2, 1), 14.0, {})}


def test_a_bucket_shows_the_trace_of_its_last_value() -> None:
    metrics = Metrics()
    speed = metrics.histogram(SPEED).of("batch")
    speed.record_traced(0.5, "aa", 1.0)
    speed.record_traced(0.75, "bb", 2.0)
    speed.record_traced(5.0, "cc", 3.0)
    snapshot = points(metrics, SPEED)["batch",]
    assert isinstance(snapshot, HistogramSnapshot) and snapshot.count == 3
    assert snapshot.exemplars == {0: Exemplar(0.75, "bb", 2.0), 2: Exemplar(5.0, "cc", 3.0)}


def test_attribute_values_from_clients_make_a_bounded_number_of_series() -> None:
    metrics = Metrics(max_values=2)
    pets = metrics.counter(PETS)
    for tenant in ("a", "b", "c", "d", "a"):
        pets.add(1, "cat", tenant)
    pets.add(1, "dog", "c")
    assert points(metrics, PETS) == {("cat", "a"): 2, ("cat", "b"): 1, ("cat", OTHER): 2, ("dog", OTHER): 1}


def test_an_observable_instrument_is_read_at_each_collection() -> None:
    metrics = Metrics(max_values=1)
    open_requests = gauge("open", "{request}", "Open.", ("tenant",))
    now = {("a",): 1.0, ("b",): 2.0, ("c",): 3.0}
    metrics.watch(open_requests, lambda: now)
    assert points(metrics, open_requests) == {("a",): 1.0, (OTHER,): 5.0}
    now.clear()
    assert metrics.collect() == []


def test_a_name_is_counted_once() -> None:
    metrics = Metrics()
    metrics.counter(PETS)
    with pytest.raises(ValueError, match="pets"):
        metrics.watch(PETS, dict)


def test_totals_are_of_values() -> None:
    assert total([2.0, HistogramSnapshot((1, 2), 9.0, {})]) == 5.0


def test_the_list_is_in_order() -> None:
    instruments = all_instruments()
    assert len({each.name for each in instruments}) == len(instruments) > 50
    for each in instruments:
        assert each.description.endswith("."), each
        assert len(set(each.attributes)) == len(each.attributes), each
        assert (each.kind is Kind.HISTOGRAM) == bool(each.bounds), each
        assert list(each.bounds) == sorted(set(each.bounds)), each


@given(st.lists(st.one_of(st.floats(0, 10), st.sampled_from((0.5, 1.0, 2.0)))))
def test_what_rises_is_counted_as_one_by_one(values: list[float]) -> None:
    one_by_one, together = HistogramSeries((0.5, 1.0, 2.0)), HistogramSeries((0.5, 1.0, 2.0))
    for value in sorted(values):
        one_by_one.record(value)
    together.record_sorted(sorted(values))
    assert together.counts == one_by_one.counts and together.sum == pytest.approx(one_by_one.sum)
