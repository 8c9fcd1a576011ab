"""Test that length distributions have the requested medians, quantiles and bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workload import seeded_random
from tandem.workload.lengths import MAX_TOKENS, LogNormal, Quantiles, length_at, require

POINTS = ((0.0, 10), (0.5, 100), (0.9, 1000), (1.0, 5000))
KINDS = ((3, 9), LogNormal(200.0, 1.0, 20, 3000), Quantiles(POINTS))


@given(st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_lengths_are_monotonic_and_within_bounds(kind: object, one: float, other: float) -> None:
    low, high = sorted((one, other))
    bounds = {KINDS[0]: (3, 9), KINDS[1]: (20, 3000), KINDS[2]: (10, 5000)}[kind]  # type: ignore[index]
    assert bounds[0] <= length_at(kind, low) <= length_at(kind, high) <= bounds[1]  # type: ignore[arg-type]


def test_a_range_is_uniform() -> None:
    assert [length_at((3, 5), at) for at in (0.0, 0.33, 0.34, 0.66, 0.67, 0.999)] == [3, 3, 4, 4, 5, 5]


def test_a_log_normal_distribution_has_its_median_and_spread() -> None:
    law = LogNormal(200.0, 0.5, 1, MAX_TOKENS)
    assert length_at(law, 0.5) == 200
    assert length_at(law, 0.8413) == pytest.approx(200 * math.exp(0.5), rel=0.01)
    assert length_at(law, 0.0) >= 1
    assert length_at(LogNormal(200.0, 0.0, 1, 999), 0.9) == 200


def test_quantiles_are_met_and_linear_in_between() -> None:
    kind = Quantiles(POINTS)
    assert [length_at(kind, at) for at in (0.0, 0.25, 0.5, 0.7, 0.9, 0.95)] == [10, 55, 100, 550, 1000, 3000]
    lengths = [length_at(kind, seeded_random.uniform(1, n)) for n in range(4000)]
    for share, length in POINTS:
        assert sum(each <= length for each in lengths) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "points",
    [
        ((0.0, 5),),
        ((0.1, 5), (1.0, 9)),
        ((0.0, 5), (0.9, 9)),
        ((0.0, 5), (0.5, 6), (0.5, 7), (1.0, 9)),
        ((0.0, 9), (1.0, 5)),
        ((0.0, 0), (1.0, 5)),
    ],
)
def test_quantiles_out_of_order_are_refused(points: tuple[tuple[float, int], ...]) -> None:
    with pytest.raises(ValueError, match="got"):
        Quantiles(points)


def test_other_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="sigma"):
        LogNormal(5.0, -1.0, 1, 9)
    with pytest.raises(ValueError, match="inverted"):
        LogNormal(5.0, 1.0, 9, 1)
    for pair in [(0, 4), (4, 3), (1, MAX_TOKENS + 1)]:
        with pytest.raises(ValueError, match="range"):
            require(pair)


def test_a_wide_log_normal_distribution_ends_at_its_bounds() -> None:
    """A sigma in tokens is a likely mistake, and must not end a long run at a rare length."""
    wide = LogNormal(600.0, 200.0, 16, 8000)
    assert [length_at(wide, at) for at in (0.0, 1e-6, 0.5, 1 - 1e-6, 1 - 2.0**-53)] == [16, 16, 600, 8000, 8000]
