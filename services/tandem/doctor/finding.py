"""What one check found and what to do about it; never looks for anything itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Severity(Enum):
    """The value is what reports say."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names what was looked at; `found` is what there is, of a skipped check why nobody looked; `fix` a
    command, a setting or a key of the chart's values, and there is one exactly where something is to be done.
    `figures` are     for machines, where what was found is a measurement."""

    check: str
    verdict: Severity
    found: str
    fix: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.fix) is not (self.verdict in (Severity.WARN, Severity.FAIL)):
            raise ValueError(f"{self.check}: a fix is for what is wrong, and all that is wrong has one")
        if not self.found:
            raise ValueError(f"{self.check}: nothing is said of what was found")


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Severity.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Severity.FAIL, found, fix)


def skip(check: str, reason: str) -> Finding:
    return Finding(check, Severity.SKIP, reason)


def wrong(check: str, found: str, fix: str, *, is_fatal: bool) -> Finding:
    """A failure where it is fatal, else a warning."""
    return Finding(check, Severity.FAIL if is_fatal else Severity.WARN, found, fix)
