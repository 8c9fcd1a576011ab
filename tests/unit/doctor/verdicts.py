"""Assertions on findings, for tests of the doctor."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.doctor.finding import Finding, Severity


def verdicts(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return (check, severity) of each finding."""
    return [(finding.check, finding.verdict.value) for finding in findings]


def assert_fails(finding: Finding, check: str, found: str, fix: str) -> None:
    _assert(finding, Severity.FAIL, check, found, fix)


def assert_warns(finding: Finding, check: str, found: str, fix: str) -> None:
    _assert(finding, Severity.WARN, check, found, fix)


def assert_fine(finding: Finding, check: str, found: str) -> None:
    _assert(finding, Severity.OK, check, found, "")


def assert_skips(finding: Finding, check: str, reason: str) -> None:
    _assert(finding, Severity.SKIP, check, reason, "")


def _assert(finding: Finding, verdict: Severity, check: str, found: str, fix: str) -> None:
    assert (finding.check, finding.verdict) == (check, verdict), finding
    assert found in finding.found, finding.found
    assert fix in finding.fix, finding.fix
