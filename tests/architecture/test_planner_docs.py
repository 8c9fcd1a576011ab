"""Settings and metrics that docs/planner.md names are the code's; never judges how it is said."""

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


def test_every_metric_is_told_and_each_is_named() -> None:
    told = {prometheus_name(each) for each in all_instruments()}
    assert set(re.findall(r"`(tandem_\w+)`", TEXT)) == {name for name in told if name.startswith("tandem_planner")}
