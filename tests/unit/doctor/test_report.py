"""Test the table, the JSON document and the exit code."""

from __future__ import annotations

import json

import pytest

from tandem.doctor.finding import Finding, Severity, fail, ok, skip, warn
from tandem.doctor.report import document, exit_code, table
from tandem.doctor.runner import Examined

FINE = Examined("a", (ok("redis", "it answers"), skip("gpu", "there is none")), 0.25)
LATE = Examined("b", (warn("shared-memory", "little", "more of it"),), 0.5)
DEAD = Examined("c", (fail("ports", "taken", "end who has it"),), 1.0)


@pytest.mark.parametrize(
    ("examined", "code", "strict"),
    [((), 0, 0), ((FINE,), 0, 0), ((FINE, LATE), 0, 1), ((FINE, DEAD), 1, 1), ((FINE, LATE, DEAD), 1, 1)],
)
def test_the_exit_code(examined: tuple[Examined, ...], code: int, strict: int) -> None:
    assert exit_code(examined, is_strict=False) == code
    assert exit_code(examined, is_strict=True) == strict


def test_the_table_is_aligned_and_has_fixes_below() -> None:
    assert table([FINE, LATE, DEAD], has_colour=False).splitlines() == [
        "ok    redis          it answers",
        "skip  gpu            there is none",
        "warn  shared-memory  little",
        "                     -> more of it",
        "fail  ports          taken",
        "                     -> end who has it",
        "",
        "1 ok, 1 warned, 1 failed, 1 skipped",
    ]


def test_colour_only_if_requested() -> None:
    painted = table([DEAD], has_colour=True)
    assert "\x1b[31mfail\x1b[0m  ports" in painted
    assert "\x1b" not in table([DEAD], has_colour=False)


def test_the_document_has_all_of_it() -> None:
    measured = Examined("d", (Finding("pairs", Severity.OK, "fast", figures={"gbps": 4.5}),), 2.0)
    report = json.loads(json.dumps(document([FINE, LATE, measured], is_strict=False)))
    assert report["ok"] is True and document([LATE], is_strict=True)["ok"] is False
    assert report["counts"] == {"ok": 2, "warn": 1, "fail": 0, "skip": 1}
    assert report["findings"][2] == {
        "check": "shared-memory",
        "verdict": "warn",
        "found": "little",
        "fix": "more of it",
    }
    assert report["findings"][3]["figures"] == {"gbps": 4.5}
    assert report["seconds"] == {"a": 0.25, "b": 0.5, "d": 2.0}
