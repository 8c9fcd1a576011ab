"""Test that requests arrive at the requested rate, with each kind of arrival process."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from statistics import fmean, median

import pytest

from tandem.workload.arrivals import Arrivals, Batches, Bursts, Constant, Poisson, due_times


def first(arrivals: Arrivals, count: int, rate: float, seed: int = 1) -> list[float]:
    return list(islice(due_times(arrivals, rate, seed, "some"), count))


@pytest.mark.parametrize(
    "arrivals", [Constant(), Poisson(), Bursts(2.0, 6.0, 0.1), Bursts(0.5, 2.0), Batches(5)], ids=repr
)
def test_every_kind_keeps_the_order_and_the_rate(arrivals: Arrivals) -> None:
    due = first(arrivals, 20_000, rate=8.0)
    assert due == sorted(due) and due[0] >= 0
    assert len(due) / due[-1] == pytest.approx(8.0, rel=0.1)
    assert first(arrivals, 100, rate=8.0) == due[:100]
    assert set(first(arrivals, 100, rate=0.0)) == {0.0}


def test_poisson_gaps_are_exponential() -> None:
    waits = [after - before for before, after in pairwise(first(Poisson(), 4000, rate=5.0))]
    assert fmean(waits) == pytest.approx(1 / 5, rel=0.05)
    # Half of exponential waits are shorter than ln 2 of the mean; of regular ones none would be.
    assert median(waits) == pytest.approx(0.6931 / 5, rel=0.07)


def test_constant_gaps_are_equal() -> None:
    assert first(Constant(), 4, rate=2.0) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(("outside", "rate"), [(0.05, 5.76), (0.0, 4.8)])
def test_bursts_have_two_rates(outside: float, rate: float) -> None:
    """24 per second inside and 1.2, or none, outside; counts per second of a run separate the two."""
    due = first(Bursts(10.0, 40.0, outside), 50_000, rate)
    in_second = Counter(map(int, due))
    numbers = [in_second[second] for second in range(int(due[-1]))]
    busy, quiet = [n for n in numbers if n > 10], [n for n in numbers if n <= 10]
    assert len(busy) / len(numbers) == pytest.approx(0.2, abs=0.04)
    # Seconds in which the rate changes are in both.
    assert fmean(busy) == pytest.approx(24, rel=0.1) and fmean(quiet) == pytest.approx(24 * outside, abs=0.2)


def test_a_run_begins_in_a_burst_with_the_probability_of_one() -> None:
    at_once = sum(first(Bursts(10.0, 40.0), 1, rate=100.0, seed=seed)[0] < 0.1 for seed in range(400))
    assert at_once / 400 == pytest.approx(0.2, abs=0.06)


def test_batches_arrive_at_once() -> None:
    due = first(Batches(7), 70, rate=5.0)
    assert set(Counter(due).values()) == {7} and len(set(due)) == 10
