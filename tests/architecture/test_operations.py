"""Test that the settings, metrics and errors that docs/operations.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.core.config import Config, value_of
from tandem.core.errors import ErrorKind
from tandem.core.settings import settings
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.prometheus import prometheus_name
from tests.architecture.test_docs import names, rows

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/operations.md").read_text()


def test_the_defaults_are_the_code_s() -> None:
    documented = {names(row[0])[0]: row[1] for row in rows(TEXT, "Settings that matter")}
    assert documented == {key: str(value_of(Config(), key)) or "empty" for key in documented} and len(documented) > 10


def test_every_setting_that_is_named_is_one() -> None:
    sections = {setting.section for setting in settings()}
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.\w+)`", TEXT))
    assert named <= {setting.key for setting in settings()}
    assert named <= {names(row[0])[0] for row in rows(TEXT, "Settings that matter")}, "each that is named is explained"


def test_every_metric_that_is_named_exists() -> None:
    named = set(re.findall(r"`(tandem_\w+)`", TEXT))
    assert named and named <= {prometheus_name(instrument) for instrument in all_instruments()}


def test_every_error_is_one() -> None:
    kinds = {kind.value for kind in ErrorKind}
    assert set(re.findall(r"50\d `(\w+)`", TEXT)) <= kinds


def test_what_an_attack_costs_is_what_was_measured_last() -> None:
    section = (ROOT / "loadtest/RESULTS.md").read_text().partition("### What does one tenant's attack cost")[2]
    latest = [line.split("|") for line in section.partition("| 2026-")[0].splitlines() if "p99 ms |" in line]
    digits, schemas = ([row[place].strip() for row in latest] for place in (4, 7))
    documented = re.findall(r"(\d\.\d\d) to (\d\.\d\d)\s+times", TEXT.partition("loadtest neighbour")[2])
    assert documented == [(min(digits), max(digits)), (min(schemas), max(schemas))]
