"""What deploy/ holds, parsed, and the names of all series that Tandem has; never judges them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.obs.metrics.instrument import Kind
from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.prometheus import prometheus_name
from tests.deploy.promql import names_in

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
PROMETHEUS = DEPLOY / "prometheus"

TARGET_LABELS = frozenset({"job", "instance", "namespace", "pool", "worker", "model", "scraped"})
"""Prometheus gives them: `job` and `instance` to all series, its operator `namespace`, what discovery says to those of
a worker."""


def read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.CSafeLoader)


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and whose it is: `board / panel`, or the name of a rule."""

    where: str
    expression: str


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Their places, as `board / panel`, and themselves."""
    for board in dashboards():
        for panel in board["panels"]:
            if panel["type"] != "row":
                yield f"{board['uid']} / {panel['title']}", panel


def panel_queries() -> list[Query]:
    return [Query(where, target["expr"]) for where, panel in panels() for target in panel["targets"]]


def rules(kind: str) -> list[dict[str, Any]]:
    """Of a kind: `alert` or `record`."""
    files = [read_yaml(PROMETHEUS / name) for name in read_yaml(PROMETHEUS / "prometheus.yml")["rule_files"]]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if kind in rule]


def rule_queries() -> list[Query]:
    return [Query(rule[kind], rule["expr"]) for kind in ("record", "alert") for rule in rules(kind)]


def known_series() -> dict[str, frozenset[str]]:
    """Every name that a query may use -> the labels of its series."""
    known = {"up": frozenset({"job", "instance", "namespace", "scraped"})}
    for instrument in all_instruments():
        name = prometheus_name(instrument)
        labels = TARGET_LABELS | {attribute.replace(".", "_") for attribute in instrument.attributes}
        if instrument.kind is Kind.HISTOGRAM:
            known |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            known[name] = labels
    for rule in rules("record"):
        known[rule["record"]] = names_in(rule["expr"]).grouped
    return known
