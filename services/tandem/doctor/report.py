"""Format the findings of all checks as a table or as a JSON document, and compute the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.doctor.finding import Finding, Severity
from tandem.doctor.runner import Examined

_COLOURS = {Severity.OK: "32", Severity.WARN: "33", Severity.FAIL: "31", Severity.SKIP: "2"}
"""SGR codes: green, yellow, red, faint."""
_COUNTED = {Severity.OK: "ok", Severity.WARN: "warned", Severity.FAIL: "failed", Severity.SKIP: "skipped"}


def exit_code(examined: Sequence[Examined], *, is_strict: bool) -> int:
    """Return the exit code of the doctor: 1 if a check failed, or with `is_strict` if there is a warning, else 0."""
    verdicts = {finding.verdict for finding in _findings(examined)}
    return int(Severity.FAIL in verdicts or (is_strict and Severity.WARN in verdicts))


def table(examined: Sequence[Examined], *, has_colour: bool) -> str:
    """Format the findings as lines of text: each finding with its remedy below, and at the end the number of findings
    of each severity.

    `has_colour`: whether to colour the severities with escape codes of a terminal."""
    findings = _findings(examined)
    widths = max(map(len, (v.value for v in Severity))), max((len(f.check) for f in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        verdict = _painted(finding.verdict.value.ljust(widths[0]), finding.verdict, has_colour)
        lines.append(f"{verdict}  {finding.check.ljust(widths[1])}  {finding.found}")
        if finding.fix:
            lines.append(" " * (sum(widths) + 4) + f"-> {finding.fix}")
    counted = Counter(finding.verdict for finding in findings)
    summary = ", ".join(f"{counted[verdict]} {noun}" for verdict, noun in _COUNTED.items() if counted[verdict])
    return "\n".join([*lines, "", summary or "no check was run"])


def document(examined: Sequence[Examined], *, is_strict: bool) -> dict[str, Any]:
    """Return the content of the JSON report as a dictionary.

    `ok`: whether the exit code is 0. `counts`: number of findings of each severity. `findings`: all findings.
    `seconds`: duration of each check. `is_strict`: a warning makes the exit code 1 too."""
    counted = Counter(finding.verdict for finding in _findings(examined))
    return {
        "ok": exit_code(examined, is_strict=is_strict) == 0,
        "counts": {verdict.value: counted[verdict] for verdict in Severity},
        "findings": [_entry(finding) for finding in _findings(examined)],
        "seconds": {each.check: round(each.seconds, 3) for each in examined},
    }


def _entry(finding: Finding) -> dict[str, Any]:
    entry: dict[str, Any] = {"check": finding.check, "verdict": finding.verdict.value, "found": finding.found}
    if finding.fix:
        entry["fix"] = finding.fix
    if finding.figures:
        entry["figures"] = dict(finding.figures)
    return entry


def _findings(examined: Sequence[Examined]) -> list[Finding]:
    return [finding for each in examined for finding in each.findings]


def _painted(text: str, verdict: Severity, has_colour: bool) -> str:
    return f"\x1b[{_COLOURS[verdict]}m{text}\x1b[0m" if has_colour else text
