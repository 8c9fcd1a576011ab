"""Test the replay of past bursts."""

from __future__ import annotations

import pytest

from tandem.scaling.burst_replay import late_share, least_workers, shape
from tests.unit.scaling.test_forecast import samples

BURST = [(5.0, 0.5)] * 18 + [(5.0, 5.0)] * 2
"""Ten seconds of ten times as much in a hundred, 1.4 on average."""


def test_a_shape_is_independent_of_level_and_slow_changes() -> None:
    slow = shape(samples(*(100 + i for i in range(100))), 50.0)
    assert all(ratio == pytest.approx(1.0, abs=0.15) for _, ratio in slow)
    even = shape(samples(*[7.0] * 30), 50.0)
    assert [ratio for _, ratio in even] == pytest.approx([1.0] * 30)
    ratios = [ratio for _, ratio in shape(samples(*[1.0] * 20, 20.0, *[1.0] * 20), 50.0)]
    assert ratios[20] == pytest.approx(20 / (40 / 21)) and max(ratios[:20]) <= 1.0
    assert shape(samples(0.0, 0.0), 50.0) == [(5.0, 0.0), (5.0, 0.0)]


def test_work_that_arrives_in_a_burst_waits() -> None:
    """Two workers fall behind by 3 s of work per second of the burst, so by 6 s of it after 2 s, and the work of the
    other 8 of its 10 s is late. The work after it finds a backlog of 30 s that shrinks by 1.5 s per second and takes
    18.7 s to fall below 2, so 16 of 90 s of the rest are late too."""
    share = late_share(BURST[9:] + BURST[:9] * 2, 1.0, 2, 1.0)
    expected = (50 * (1 - 2 / 30) + 0.5 * (30 - 2) / 1.5) / (10 * 5.0 + 0.5 * 135)
    assert share == pytest.approx(expected, rel=0.05)


def test_enough_workers_leave_nothing_late_and_the_fewest_are_just_enough() -> None:
    assert late_share(BURST, 1.0, 5, 0.5) == 0.0
    for slack_s in (0.5, 3.0, 10.0):
        number = least_workers(BURST, 2.0, slack_s, 0.01)
        assert late_share(BURST, 2.0, number, slack_s) <= 0.01 < late_share(BURST, 2.0, number - 1, slack_s)
    assert least_workers(BURST, 2.0, 10.0, 0.01) < least_workers(BURST, 2.0, 0.5, 0.01)
    assert least_workers([], 2.0, 1.0, 0.01) == 1
