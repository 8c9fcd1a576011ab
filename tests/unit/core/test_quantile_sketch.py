"""Test that percentiles of a sketch are those of its values, exactly or within the stated error."""

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
    sketch = QuantileSketch([4.0, 1.0, 3.0, 2.0])
    summary = sketch.spread()
    assert summary is not None
    assert (summary.count, summary.mean, summary.min, summary.p50, summary.max) == (4, 2.5, 1.0, 2.5, 4.0)
    assert summary.p95 == pytest.approx(3.85) and summary.p999 == pytest.approx(3.997)


@effort(150)
@given(samples=values, num_exact=st.sampled_from([0, 5, 1000]))
def test_percentiles_match_numpy_within_the_stated_error(samples: list[float], num_exact: int) -> None:
    sketch = QuantileSketch(exact=num_exact)
    for value in samples:
        sketch.add(value)
    expected = np.quantile(samples, SHARES)
    error = 1e-12 if len(samples) <= num_exact else ERROR * 1.000001
    np.testing.assert_allclose(sketch.percentiles(SHARES), expected, rtol=error, atol=1e-9)
    assert (sketch.count, sketch.min, sketch.max) == (len(samples), min(samples), max(samples))
    assert sketch.sum == pytest.approx(sum(samples))


@pytest.mark.parametrize("count", [1001, 20_000])
def test_many_values_of_a_wide_spread_match_numpy(count: int) -> None:
    samples = np.random.default_rng(count).lognormal(mean=-4, sigma=2, size=count)
    np.testing.assert_allclose(
        QuantileSketch(samples).percentiles(SHARES), np.quantile(samples, SHARES), rtol=ERROR * 1.000001
    )


@effort(100)
@given(parts=st.lists(values, min_size=1, max_size=4), num_exact=st.sampled_from([0, 5, 1000]))
def test_merged_parts_equal_the_whole(parts: list[list[float]], num_exact: int) -> None:
    merged, whole = QuantileSketch(exact=num_exact), QuantileSketch(exact=num_exact)
    for part in [*parts, []]:
        merged.merge(QuantileSketch(part, exact=num_exact))
        whole.extend(part)
    assert merged.percentiles(SHARES) == whole.percentiles(SHARES)
    assert merged.buckets() == whole.buckets()
    assert (merged.count, merged.min, merged.max) == (whole.count, whole.min, whole.max)


@effort(100)
@given(samples=values)
def test_buckets_of_exact_and_folded_values_are_equal_and_complete(samples: list[float]) -> None:
    kept, folded = QuantileSketch(samples, exact=1000).buckets(), QuantileSketch(samples, exact=0).buckets()
    assert kept == folded == sorted(kept)
    representatives = [value for value, number in kept for _ in range(number)]
    np.testing.assert_allclose(representatives, sorted(samples), rtol=ERROR * 1.000001, atol=1e-9)


def test_many_values_take_no_more_room_than_few() -> None:
    def num_buckets(number: int) -> int:
        sketch = QuantileSketch()
        for _ in range(number // 10_000):
            sketch.extend(1e-3 * (1 + index % 1000) for index in range(10_000))
        assert sketch.percentile(0.5) == pytest.approx(0.5005, rel=ERROR)
        return len(sketch.buckets())

    assert num_buckets(200_000) == num_buckets(10_000) < 1000


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_a_value_that_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite values of 0 and more"):
        QuantileSketch().add(value)


def test_an_empty_sketch_has_no_summary() -> None:
    assert QuantileSketch().spread() is None and QuantileSketch().curve() == [] and QuantileSketch().buckets() == []
    with pytest.raises(ValueError, match="no values"):
        QuantileSketch().percentile(0.5)
