"""Test forecasts from samples of the past."""

from __future__ import annotations

from random import Random

import pytest

from tandem.scaling.cluster_state import Demand
from tandem.scaling.forecast import (
    MOST_DISPERSION,
    History,
    Sample,
    busiest,
    dispersion,
    expected_level,
    expected_rate,
    trend,
)


def samples(*rates: float, seconds: float = 5.0) -> list[Sample]:
    return [Sample(seconds * i, seconds, rate * seconds) for i, rate in enumerate(rates, start=1)]


def poisson(rng: Random, mean: float) -> int:
    """Draw a Poisson number by counting exponential times."""
    number, left = 0, rng.expovariate(mean)
    while left < 1:
        number, left = number + 1, left + rng.expovariate(mean)
    return number


def test_a_trend_is_extrapolated() -> None:
    rising = samples(*(10 + i for i in range(20)))
    # The middle of the last interval is 2.5 s before its end, and a sample counts as what came at its end.
    assert trend(rising, 60.0) == pytest.approx(29 + 12)
    assert trend(samples(*(30 - i for i in range(20))), 60.0) == 0.0
    assert trend(samples(*(30 - i for i in range(20))), 10.0) == pytest.approx(11 - 2)


def test_noise_is_hardly_a_trend() -> None:
    rng = Random(1)
    for _ in range(50):
        found = trend(samples(*(rng.gauss(100, 10) for _ in range(60))), 60.0)
        assert 85 < found < 115


def test_too_few_samples_have_no_slope() -> None:
    assert trend(samples(1.0, 9.0), 10.0) == trend(samples(1.0, 5.0, 9.0), 60.0) == pytest.approx(5.0)


def test_the_busiest_stretch_is_the_forecast() -> None:
    burst = samples(*[2.0] * 20, *[10.0] * 6, *[2.0] * 20)
    assert busiest(burst, 30.0) == pytest.approx(10.0)
    assert busiest(burst, 60.0) == pytest.approx(6.0)
    assert expected_rate(burst, 60.0) == pytest.approx(6.0)


def test_a_level_is_the_higher_end_of_the_line() -> None:
    burst = samples(*[2.0] * 20, *[10.0] * 6, *[2.0] * 20)
    assert 2.0 < expected_level(burst, 60.0) < 4.0 < expected_rate(burst, 60.0)
    assert expected_level(samples(*range(20, 0, -1)), 60.0) == pytest.approx(1.0)
    assert expected_level(samples(*range(20)), 60.0) == pytest.approx(31.0)
    assert expected_level(samples(3.0, 5.0), 60.0) == pytest.approx(4.0)


def test_less_than_a_stretch_counts_as_a_whole() -> None:
    assert busiest(samples(4.0, 6.0), 30.0) == pytest.approx(5.0)


def test_intervals_are_weighted_by_length() -> None:
    mixed = [Sample(30.0, 30.0, 60.0), Sample(35.0, 5.0, 50.0)]
    assert trend([*mixed, Sample(65.0, 30.0, 60.0)], 1e-9) == pytest.approx(170 / 65, rel=0.1)
    assert busiest(mixed, 30.0) == pytest.approx(110 / 35)


def test_dispersion_separates_bursts_from_chance() -> None:
    rng = Random(2)
    alone = [Sample(5.0 * i, 5.0, poisson(rng, 40.0)) for i in range(400)]
    assert dispersion(alone) == pytest.approx(1.0, abs=0.2)
    tens = [one._replace(amount=10.0 * poisson(rng, 4.0)) for one in alone]
    assert dispersion(tens) == pytest.approx(10.0, rel=0.25)
    assert dispersion([one._replace(amount=1e4 * (i % 2)) for i, one in enumerate(alone)]) == MOST_DISPERSION


def test_a_slow_change_is_no_burst() -> None:
    assert dispersion([Sample(5.0 * i, 5.0, 100.0 + i) for i in range(100)]) == 1.0
    assert dispersion(samples(1.0, 50.0)) == 1.0
    assert dispersion(samples(0.0, 0.0, 0.0, 0.0)) == 1.0


def test_a_history_forgets_old_intervals_and_keeps_the_last() -> None:
    history = History(20.0)
    for i in range(1, 11):
        history.add(5.0 * i, _demand(i))
    assert [one.amount for one in history.samples(lambda demand: demand.num_requests)] == [7, 8, 9, 10]
    assert history.total.num_requests == 34 and history.total.seconds == 20.0
    history.add(1000.0, _demand(3))
    assert history.total.num_requests == 3


def test_a_history_is_bounded() -> None:
    history = History(1e9)
    for i in range(5000):
        history.add(float(i), _demand(1))
    assert history.total.num_requests == 4096


def _demand(number: int) -> Demand:
    return Demand(seconds=5.0, num_requests=number, num_input_tokens=0, num_cached_tokens=0, num_output_tokens=0)
