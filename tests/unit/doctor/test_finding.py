"""A finding has a fix exactly where something is wrong."""

from __future__ import annotations

import pytest

from tandem.doctor.finding import Finding, Severity, wrong


@pytest.mark.parametrize(
    ("verdict", "fix"), [(Severity.FAIL, ""), (Severity.WARN, ""), (Severity.OK, "do it"), (Severity.SKIP, "do it")]
)
def test_a_fix_is_for_what_is_wrong_and_all_that_is_wrong_has_one(verdict: Severity, fix: str) -> None:
    with pytest.raises(ValueError, match="x: a fix"):
        Finding("x", verdict, "something", fix)


def test_something_is_always_said() -> None:
    with pytest.raises(ValueError, match="nothing is said"):
        Finding("x", Severity.OK, "")


def test_what_is_not_fatal_is_a_warning() -> None:
    assert wrong("x", "it is red", "paint it", is_fatal=False).verdict is Severity.WARN
    assert wrong("x", "it is red", "paint it", is_fatal=True).verdict is Severity.FAIL
