"""Percentiles of a histogram against numpy's of the values themselves."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.histogram import Histogram

SHARES = (0.0, 0.5, 0.95, 0.99, 0.999, 1.0)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("count", [1, 2, 3, 10, 1001, 20_000])
def test_percentiles_are_those_of_numpy_within_half_a_percent(count: int, share: float) -> None:
    values = np.random.default_rng(count).lognormal(mean=-4, sigma=2, size=count)
    assert Histogram(values).percentile(share) == pytest.approx(float(np.quantile(values, share)), rel=0.0051)


def test_a_merged_histogram_is_that_of_all_values() -> None:
    values = np.random.default_rng(5).exponential(size=3_000)
    whole, merged = Histogram(values), Histogram(values[:1_000])
    merged.merge(Histogram(values[1_000:]))
    merged.merge(Histogram())
    assert [merged.percentile(share) for share in SHARES] == [whole.percentile(share) for share in SHARES]
    assert merged.count == 3_000


def test_least_greatest_mean_and_count_are_exact_and_no_value_is_lost() -> None:
    found = Histogram([3.0, 1e-9, 0.25, 86_400.0, 0.0]).distribution()
    assert found is not None
    assert (found.count, found.max) == (5, 86_400.0)
    assert found.mean == pytest.approx(86_403.25 / 5)
    assert sum(number for _, number in found.buckets) == 5
    assert Histogram([7.5]).percentile(0.3) == 7.5


def test_its_size_does_not_grow_with_the_number_of_values() -> None:
    found = Histogram(np.random.default_rng(0).uniform(0.01, 1.0, size=50_000)).distribution()
    assert found is not None
    assert len(found.buckets) <= 465  # 1.01 to the power of 463 is 100


def test_no_values_have_no_percentile() -> None:
    assert Histogram().distribution() is None
    with pytest.raises(ValueError, match="no values"):
        Histogram().percentile(0.5)
