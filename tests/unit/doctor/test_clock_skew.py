"""Test the report on clock skew."""

from __future__ import annotations

from tandem.doctor.clock_skew import Skew, judge_skews
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns


def test_clocks_that_agree_give_one_finding() -> None:
    (finding,) = judge_skews([Skew("Redis", 0.001, 0.0005), Skew("w0", -0.2, 0.5)])
    assert_fine(finding, "clock", "differences from this machine are at most: Redis 1.5 ms, w0 0.7 s")


def test_clocks_that_do_not() -> None:
    ahead, behind = judge_skews([Skew("w0", 7.0, 0.5), Skew("w1", -40.0, 0.5), Skew("w2", 5.4, 0.5)])
    assert_warns(ahead, "clock", "w0 is 7.0 s ahead; beyond 30 s workers refuse", "`timedatectl set-ntp true`")
    assert_fails(behind, "clock", "w1 is 40.0 s behind; beyond 30 s workers refuse", "NTP")


def test_a_skew_within_its_uncertainty_is_no_finding() -> None:
    (finding,) = judge_skews([Skew("w0", 30.4, 0.5)])
    assert_warns(finding, "clock", "30.4 s ahead", "NTP")


def test_no_other_clock() -> None:
    assert_skips(judge_skews([])[0], "clock", "there is no other clock")
