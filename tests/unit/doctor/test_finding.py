"""Test that exactly warnings and failures have a fix, and the format of sizes."""

from __future__ import annotations

import pytest

from tandem.doctor.finding import Finding, Severity, format_bytes, wrong


@pytest.mark.parametrize(
    ("verdict", "fix"), [(Severity.FAIL, ""), (Severity.WARN, ""), (Severity.OK, "do it"), (Severity.SKIP, "do it")]
)
def test_exactly_warnings_and_failures_have_a_fix(verdict: Severity, fix: str) -> None:
    with pytest.raises(ValueError, match="x: warnings and failures"):
        Finding("x", verdict, "something", fix)


def test_an_empty_finding_is_refused() -> None:
    with pytest.raises(ValueError, match="found is empty"):
        Finding("x", Severity.OK, "")


def test_a_finding_that_is_not_fatal_is_a_warning() -> None:
    assert wrong("x", "it is red", "paint it", is_fatal=False).verdict is Severity.WARN
    assert wrong("x", "it is red", "paint it", is_fatal=True).verdict is Severity.FAIL


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0"), (4096, "4KiB"), (8 * MIB, "8MiB"), (8 * MIB + 5, "8MiB"), (GIB, "1GiB"), (3 * GIB // 2, "1.5GiB")],
)
def test_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
