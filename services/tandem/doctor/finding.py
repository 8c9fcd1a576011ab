"""Define the finding of a check and its severity, and format sizes in findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.core.config import Bytes

_GIB = 1 << 30


class Severity(Enum):
    """Name the severity of a finding; the value is its text in reports."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold the result of a check, as it appears in the report.

    `check`: name of what was checked. `verdict`: the severity. `found`: what the check found, or why it was skipped.
    `fix`: a remedy (a command, a setting or a key of the chart's values), required for WARN and FAIL and not allowed
    otherwise; ValueError is raised for a violation. `figures`: measured values for the JSON report."""

    check: str
    verdict: Severity
    found: str
    fix: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.fix) is not (self.verdict in (Severity.WARN, Severity.FAIL)):
            raise ValueError(f"{self.check}: warnings and failures need a fix, other findings must not have one")
        if not self.found:
            raise ValueError(f"{self.check}: found is empty")


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Severity.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Severity.FAIL, found, fix)


def skip(check: str, reason: str) -> Finding:
    return Finding(check, Severity.SKIP, reason)


def wrong(check: str, found: str, fix: str, *, is_fatal: bool) -> Finding:
    """Return a finding of severity FAIL if `is_fatal`, else of severity WARN."""
    return Finding(check, Severity.FAIL if is_fatal else Severity.WARN, found, fix)


def format_bytes(num_bytes: int) -> str:
    """Format a size such as `512MiB` or `1.5GiB`.

    The text is exact if a unit divides the size. Otherwise a size above 1 GiB is rounded to 0.1 GiB, and a smaller one
    down to whole MiB."""
    if num_bytes % _GIB and num_bytes > _GIB:
        return f"{num_bytes / _GIB:.1f}GiB"
    return str(Bytes(num_bytes if num_bytes < 1 << 20 else num_bytes >> 20 << 20))


def format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
