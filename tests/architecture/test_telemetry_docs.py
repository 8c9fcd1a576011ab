"""Test that the stages, variables, settings and metrics that docs/telemetry.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

from opentelemetry import environment_variables as of_api
from opentelemetry.sdk import environment_variables as of_sdk

from tandem.core.request_stages import Stage
from tandem.core.settings import settings
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.prometheus import prometheus_name
from tandem.obs.metrics.vllm_metrics import ALIASES
from tests.architecture.test_docs import names, rows

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/telemetry.md").read_text()


def test_every_stage_is_explained_in_its_order() -> None:
    assert [names(row[0])[0] for row in rows(TEXT, "The nine stages")] == [stage.value for stage in Stage]


def test_every_variable_is_opentelemetry_s() -> None:
    named = set(re.findall(r"OTEL_\w+", TEXT))
    assert len(named) > 10 and named <= vars(of_api).keys() | vars(of_sdk).keys()


def test_every_setting_is_one() -> None:
    named = set(re.findall(r"`((?:worker|telemetry)\.\w+)`", TEXT))
    assert named and named <= {setting.key for setting in settings()}


def test_every_metric_is_documented() -> None:
    instruments = {each.name for each in all_instruments()}
    prometheus = {prometheus_name(each) for each in all_instruments()}
    aliases = {prometheus_name(alias.instrument) for alias in ALIASES}
    assert set(re.findall(r"`(tandem_\w+)`", TEXT)) <= prometheus
    assert set(re.findall(r"`(vllm:\w+)`", TEXT)) <= aliases
    assert "tandem.step.duration" in TEXT and "tandem.step.duration" in instruments


def test_every_file_exists() -> None:
    named = set(re.findall(r"`((?:services|deploy)/[\w./]+)`", TEXT))
    assert named and all((ROOT / each).exists() for each in named)
