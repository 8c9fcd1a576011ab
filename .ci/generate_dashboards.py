"""Generate the Grafana dashboards of deploy/grafana/dashboards from the boards of deploy/grafana/boards.

A board lists rows of panels, each with its queries and a description; this program adds what all dashboards have in
common. `--check` writes nothing and exits 1 when the committed files are not what would be written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from committed import keep

ROOT = Path(__file__).resolve().parent.parent
BOARDS = ROOT / "deploy" / "grafana" / "boards"
TARGET = ROOT / "deploy" / "grafana" / "dashboards"
SCHEMA = 41
"""Schema version of Grafana 12.0; later versions of Grafana read it and migrate it."""
GRID = 24
"""Number of columns of a dashboard."""
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
VARIABLES = {
    "namespace": ("tandem_ready", "Namespace"),
    "tenant": ("tandem_requests_total", "Tenant"),
    "lane": ("tandem_requests_total", "Lane"),
    "pool": ("tandem_worker_info", "Pool"),
    "worker": ('tandem_worker_info{pool=~"$pool"}', "Worker"),
}
"""Variables of dashboards: their name, which is also a label -> a series with all values of the label, and a title."""
RELEASE = 'namespace=~"$namespace"'
"""Label matcher that selects one release. Only the Prometheus operator adds this label."""
OF_ALL = "tandem:slo_objective:ratio"
"""The one series that belongs to no release."""
SELECTOR = re.compile(r"(?:by|on|group_left) \([^)]*\)|\"[^\"]*\"|\b((?:tandem[_:]|gen_ai_|process_)[\w:]+)(\{?)")
"""Matches the series that an expression queries; groupings and quoted texts match without a group."""

Panel = Mapping[str, Any]


def main() -> int:
    return keep("Generate the Grafana dashboards.", TARGET, "*.json", generate, "make boards")


def generate() -> dict[str, str]:
    """Return the content of every dashboard by file name."""
    boards = [yaml.safe_load(path.read_text()) for path in sorted(BOARDS.glob("*.yaml"))]
    titles = {board["uid"]: board["title"] for board in boards}
    made = {f"{board['uid']}.json": dashboard(board, titles) for board in boards}
    return {name: json.dumps(board, indent=1) + "\n" for name, board in made.items()}


def dashboard(board: Panel, titles: Mapping[str, str]) -> dict[str, Any]:
    return {
        "uid": board["uid"],
        "title": board["title"],
        "description": board["description"],
        "tags": ["tandem"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [link(uid, title) for uid, title in titles.items() if uid != board["uid"]],
        "templating": {"list": [source(), *(variable(name) for name in ("namespace", *board["variables"]))]},
        "panels": list(laid_out(board, titles)),
    }


def link(uid: str, title: str) -> dict[str, Any]:
    """Return a link to another dashboard that keeps the time range and the variables."""
    short = title.removeprefix("Tandem / ")
    return {"type": "link", "title": short, "url": f"/d/{uid}", "keepTime": True, "includeVars": True}


def source() -> dict[str, Any]:
    return {"name": "DS_PROMETHEUS", "label": "Data source", "type": "datasource", "query": "prometheus"}


def variable(name: str) -> dict[str, Any]:
    series, title = VARIABLES[name]
    query = f"label_values({series if name == 'namespace' else of_release(series)}, {name})"
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # with every change of the time
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def of_release(expression: str) -> str:
    """Return an expression whose series are limited to the namespace that the user selects."""

    def bound(found: re.Match[str]) -> str:
        series, brace = found.groups()
        if series is None or series == OF_ALL:
            return found[0]
        return f"{series}{{{RELEASE}{',' if brace else '}'}"

    return SELECTOR.sub(bound, expression)


def laid_out(board: Panel, titles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows and panels with their places, from left to right; each line is as high as its highest panel."""
    number, top = 1, 0
    for row in board["rows"]:
        place = {"x": 0, "y": top, "w": GRID, "h": 1}
        yield {"id": number, "type": "row", "title": row["title"], "collapsed": False, "gridPos": place, "panels": []}
        number, top, left, high = number + 1, top + 1, 0, 0
        for given in row["panels"]:
            width, height = given.get("width", 8), given.get("height", 8)
            if left + width > GRID:
                top, left, high = top + high, 0, 0
            made = panel(given, {"x": left, "y": top, "w": width, "h": height}, titles)
            yield {"id": number, **made, "targets": list(targets(given, board["filter"]))}
            number, left, high = number + 1, left + width, max(high, height)
        top += high


def panel(given: Panel, place: dict[str, int], titles: Mapping[str, str]) -> dict[str, Any]:
    """Return a panel without its queries."""
    kind = given.get("kind", "timeseries")
    return {
        "type": kind,
        "title": given["title"],
        "description": given["description"],
        "datasource": SOURCE,
        "gridPos": place,
        "links": [panel_link(uid, titles[uid]) for uid in given.get("links", ())],
        "fieldConfig": {"defaults": defaults(given, kind), "overrides": []},
        "options": OPTIONS[kind],
    }


def panel_link(uid: str, title: str) -> dict[str, str]:
    return {"title": title.removeprefix("Tandem / "), "url": f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}"}


def queries(given: Panel) -> Iterator[Panel]:
    """Yield the queries of a panel; a query with `quantiles` is yielded once for each of them."""
    for query in given["queries"]:
        for quantile in query.get("quantiles", (None,)):
            if quantile is None:
                yield query
                continue
            legend = f"{query.get('legend', '')} p{quantile * 100:g}".strip()
            yield {**query, "legend": legend, "expr": query["expr"].replace("$quantile", f"{quantile:g}")}


def targets(given: Panel, where: str) -> Iterator[dict[str, Any]]:
    """Yield the queries of a panel in Grafana's form. `where`: label matchers that replace `$filter`."""
    for index, query in enumerate(queries(given)):
        is_instant, expression = query.get("instant", False), of_release(query["expr"].replace("$filter", where))
        yield {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": expression,
            "legendFormat": query["legend"],
            "instant": is_instant,
            "range": not is_instant,
            "exemplar": given.get("exemplars", False) and "histogram_quantile" in expression,
        }


def defaults(given: Panel, kind: str) -> dict[str, Any]:
    colours = given.get("thresholds", {"green": None})
    found: dict[str, Any] = {
        "unit": given["unit"],
        "thresholds": {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in colours.items()]},
    }
    if kind == "timeseries" or "max" in given:
        found["min"] = 0
    if "max" in given:
        found["max"] = given["max"]
    if "no_value" in given:
        found["noValue"] = given["no_value"]
    if kind == "timeseries":
        found["color"] = {"mode": "palette-classic"}
        found["custom"] = rendering(given)
    return found


def rendering(given: Panel) -> dict[str, Any]:
    is_stacked = given.get("stack", False)
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if is_stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if "thresholds" in given else "off"},
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"], "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "bargauge": {
        "orientation": "horizontal",
        "displayMode": "basic",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
}


if __name__ == "__main__":
    sys.exit(main())
