"""Percentiles of a histogram are those of its values, exactly or to within what it states; never of a real run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.quantile_sketch import ERROR, QuantileSketch
from tests.effort import effort

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 0.999, 1.0)
values = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e4)), min_size=1, max_size=300)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    histogram = QuantileSketch([4.0, 1.0, 3.0, 2.0])
    spread = histogram.spread()
    assert spread is not None
    assert (spread.count, spread.mean, spread.min, spread.p50, spread.max) == (4, 2.5, 1.0, 2.5, 4.0)
    assert spread.p95 == pytest.approx(3.85) and spread.p999 == pytest.approx(3.997)


@effort(150)
@given(found=values, num_exact=st.sampled_from([0, 5, 1000]))
def test_percentiles_are_those_of_numpy_to_within_what_is_stated(found: list[float], num_exact: int) -> None:
    histogram = QuantileSketch(exact=num_exact)
    for value in found:
        histogram.add(value)
    expected = np.quantile(found, SHARES)
    error = 1e-12 if len(found) <= num_exact else ERROR * 1.000001
    np.testing.assert_allclose(histogram.percentiles(SHARES), expected, rtol=error, atol=1e-9)
    assert (histogram.count, histogram.min, histogram.max) == (len(found), min(found), max(found))
    assert histogram.sum == pytest.approx(sum(found))


@pytest.mark.parametrize("count", [1001, 20_000])
def test_many_values_of_a_wide_spread_are_told_as_numpy_does(count: int) -> None:
    found = np.random.default_rng(count).lognormal(mean=-4, sigma=2, size=count)
    np.testing.assert_allclose(
        QuantileSketch(found).percentiles(SHARES), np.quantile(found, SHARES), rtol=ERROR * 1.000001
    )


@effort(100)
@given(parts=st.lists(values, min_size=1, max_size=4), num_exact=st.sampled_from([0, 5, 1000]))
def test_parts_that_are_merged_are_the_whole(parts: list[list[float]], num_exact: int) -> None:
    merged, whole = QuantileSketch(exact=num_exact), QuantileSketch(exact=num_exact)
    for part in [*parts, []]:
        merged.merge(QuantileSketch(part, exact=num_exact))
        whole.extend(part)
    assert merged.percentiles(SHARES) == whole.percentiles(SHARES)
    assert merged.buckets() == whole.buckets()
    assert (merged.count, merged.min, merged.max) == (whole.count, whole.min, whole.max)


@effort(100)
@given(found=values)
def test_buckets_are_the_same_whether_values_are_still_kept_and_lose_none(found: list[float]) -> None:
    kept, folded = QuantileSketch(found, exact=1000).buckets(), QuantileSketch(found, exact=0).buckets()
    assert kept == folded == sorted(kept)
    stands_for = [value for value, number in kept for _ in range(number)]
    np.testing.assert_allclose(stands_for, sorted(found), rtol=ERROR * 1.000001, atol=1e-9)


def test_many_values_take_no_more_room_than_few() -> None:
    def num_buckets(number: int) -> int:
        histogram = QuantileSketch()
        for _ in range(number // 10_000):
            histogram.extend(1e-3 * (1 + index % 1000) for index in range(10_000))
        assert histogram.percentile(0.5) == pytest.approx(0.5005, rel=ERROR)
        return len(histogram.buckets())

    assert num_buckets(200_000) == num_buckets(10_000) < 1000


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite values from 0 on"):
        QuantileSketch().add(value)


def test_of_no_values_there_is_nothing_to_tell() -> None:
    assert QuantileSketch().spread() is None and QuantileSketch().curve() == [] and QuantileSketch().buckets() == []
    with pytest.raises(ValueError, match="no values"):
        QuantileSketch().percentile(0.5)
