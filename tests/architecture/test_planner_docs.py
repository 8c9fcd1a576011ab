"""Test that the settings and metrics that docs/planner.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.core.settings import settings
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.prometheus import prometheus_name

TEXT = (Path(__file__).resolve().parents[2] / "docs/planner.md").read_text()


def test_every_setting_is_one() -> None:
    named = set(re.findall(r"`(planner\.\w+)", TEXT))
    assert len(named) > 5 and named <= {setting.key for setting in settings()}


def test_every_planner_metric_is_documented_and_every_documented_one_exists() -> None:
    exported = {prometheus_name(each) for each in all_instruments()}
    assert set(re.findall(r"`(tandem_\w+)`", TEXT)) == {name for name in exported if name.startswith("tandem_planner")}
