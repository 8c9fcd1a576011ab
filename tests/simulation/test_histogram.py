"""Percentiles of a histogram are those of its values, exactly or to within what it states; never of a real run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.sim.histogram import ERROR, Histogram
from tests.property.effort import effort

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 0.999, 1.0)
values = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e4)), min_size=1, max_size=300)


def exactly(found: list[float], share: float) -> float:
    ordered = sorted(found)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    histogram = Histogram()
    histogram.extend([4.0, 1.0, 3.0, 2.0])
    spread = histogram.spread()
    assert spread is not None
    assert (spread.count, spread.mean, spread.min, spread.p50, spread.max) == (4, 2.5, 1.0, 2.5, 4.0)
    assert spread.p95 == pytest.approx(3.85) and spread.p999 == pytest.approx(3.997)
    assert Histogram().spread() is None and Histogram().curve() == []


@effort(150)
@given(found=values, num_exact=st.sampled_from([0, 5, 1000]))
def test_percentiles_are_off_by_no_more_than_is_stated(found: list[float], num_exact: int) -> None:
    histogram = Histogram(num_exact)
    for value in found:
        histogram.add(value)
    for share, told in zip(SHARES, histogram.percentiles(SHARES), strict=True):
        if len(found) <= num_exact:
            assert told == exactly(found, share)
        else:
            assert told == pytest.approx(exactly(found, share), rel=ERROR * 1.000001, abs=1e-9)
    assert (histogram.count, histogram.min, histogram.max) == (len(found), min(found), max(found))
    assert histogram.sum == pytest.approx(sum(found))


@effort(100)
@given(parts=st.lists(values, min_size=1, max_size=4), num_exact=st.sampled_from([0, 5, 1000]))
def test_parts_that_are_merged_are_the_whole(parts: list[list[float]], num_exact: int) -> None:
    merged, whole = Histogram(num_exact), Histogram(num_exact)
    for part in parts:
        one = Histogram(num_exact)
        one.extend(part)
        merged.merge(one)
        whole.extend(part)
    assert merged.percentiles(SHARES) == whole.percentiles(SHARES)
    assert (merged.count, merged.min, merged.max) == (whole.count, whole.min, whole.max)


def test_many_values_take_no_more_room_than_few() -> None:
    def num_buckets(number: int) -> int:
        histogram = Histogram()
        for _ in range(number // 10_000):
            histogram.extend(1e-3 * (1 + index % 1000) for index in range(10_000))
        assert histogram.percentile(0.5) == pytest.approx(0.5005, rel=ERROR)
        return len(histogram._buckets)

    assert num_buckets(200_000) == num_buckets(10_000) < 1000


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite values from 0 on"):
        Histogram().add(value)
    with pytest.raises(ValueError, match="no values"):
        Histogram().percentile(0.5)
