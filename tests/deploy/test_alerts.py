"""Alerts fire when they should and not beside it, by Prometheus' own tool, and say what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.admission.quota import CONCURRENCY, REQUESTS, TOKENS
from tandem.core.errors import ErrorKind
from tandem.core.settings import settings
from tandem.worker.engine.watchdog import STALL_FACTOR
from tests.chart.kept import run_cached
from tests.deploy.files import PROMETHEUS, ROOT, Query, panels, read_yaml, rule_queries, rules
from tests.deploy.programs import program

ALERTS = rules("alert")
TESTS = PROMETHEUS / "alerts_test.yaml"
EACH = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])


def promtool(*arguments: str) -> str:
    """Return promtool's output for our Prometheus files; it is cached, because a run takes seconds."""
    result = run_cached([program("promtool"), *arguments], reads=[PROMETHEUS], cwd=PROMETHEUS)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_prometheus_takes_its_configuration() -> None:
    assert "2 rule files found" in promtool("check", "config", "prometheus.yml")


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", TESTS.name)


def test_every_alert_is_seen_to_fire_and_not_to() -> None:
    fired, quiet = set[str](), 0
    for test in read_yaml(TESTS)["tests"]:
        for expectation in test["promql_expr_test"]:
            quiet += expectation["expr"] == 'ALERTS{alertstate="firing"}' and not expectation["exp_samples"]
            labels = " ".join(sample["labels"] for sample in expectation["exp_samples"])
            fired |= set(re.findall(r'alertname="(\w+)"', labels))
    assert fired == {alert["alert"] for alert in ALERTS} and len(fired) == len(ALERTS)
    assert quiet >= len(read_yaml(TESTS)["tests"]) - 1


@pytest.mark.parametrize("query", rule_queries(), ids=lambda query: query.where)
def test_no_release_is_added_to_another(query: Query) -> None:
    """Every aggregation and every match of an alert keeps series of different namespaces apart."""
    assert not re.findall(r"\b(?:sum|min|max|avg|count)\b(?! by \(namespace\b)", query.expression)
    assert not re.findall(r"\b(?:on|ignoring) \((?!namespace\b)", query.expression)


@EACH
def test_an_alert_has_a_summary_and_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket", "info")
    annotations = alert["annotations"]
    assert 20 < len(annotations["summary"]) < 120
    assert [part.partition(": ")[0] for part in annotations["runbook"].splitlines()] == ["Means", "Check", "Do"]
    assert alert["for"]


@EACH
def test_what_a_runbook_names_exists(alert: dict[str, Any]) -> None:
    text = alert["annotations"]["runbook"]
    known = {setting.key for setting in settings()}
    sections = {setting.section for setting in settings()}
    assert set(re.findall(rf"(?<!docs/)\b(?:{'|'.join(sections)})\.[a-z_]+\b", text)) <= known
    assert set(re.findall(r"\bTandem[A-Z]\w+", text)) <= {other["alert"] for other in ALERTS}
    assert all((ROOT / path).is_file() for path in re.findall(r"docs/[\w-]+\.\w+", text))
    quoted = set(re.findall(r'(?<!=)"([^"]+)"', re.sub(r"`[^`]*`", "", text)))
    assert quoted <= {place.partition(" / ")[2] for place, _ in panels()}, "panels of dashboards"


def test_a_gateway_is_ready_whatever_its_tenants_file_is() -> None:
    """A file that it rejects is a warning of /ready (tests/unit/gateway/test_tenants_http.py)."""
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "TandemGatewayNotReady")
    assert "tenants" not in alert["annotations"]["runbook"]


def test_only_redis_makes_the_prefix_index_unreachable() -> None:
    """Programs with other settings find no blocks in the index; that it can be read does not depend on them."""
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "TandemPrefixIndexUnreachable")
    assert "redis.index_stride" not in alert["annotations"]["runbook"]


def test_the_runbook_knows_when_a_step_stalls() -> None:
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "TandemWorkerUnhealthy")
    assert f"worker.step_stall_s and {STALL_FACTOR} times the longest recent one," in alert["annotations"]["runbook"]


def test_outcomes_that_alerts_count_are_kinds_of_errors() -> None:
    counted = [re.search(r'tandem_requests_total\{outcome=~"([^"]+)"', alert["expr"]) for alert in ALERTS]
    outcomes = [outcome for found in counted if found for outcome in found[1].split("|")]
    assert len(outcomes) > 5 and set(outcomes) <= {kind.value for kind in ErrorKind}


def test_reasons_that_alerts_count_are_those_of_an_admission() -> None:
    counted = {
        part
        for alert in ALERTS
        for found in re.findall(r'reason=~"([^"]+)"', alert["expr"])
        for part in found.split("|")
    }
    assert counted and counted <= {REQUESTS, TOKENS, CONCURRENCY, "connections", "large_bodies"}


def test_reasons_that_alerts_count_are_documented() -> None:
    documented = (ROOT / "docs/http.md").read_text()
    for alert in ALERTS:
        for reasons in re.findall(r'reason=~"([^"]+)"', alert["expr"]):
            assert all(f"`{reason}`" in documented for reason in reasons.split("|")), alert["alert"]
