"""Generates deploy/grafana/dashboards from deploy/grafana/boards; never edits what it did not write, and asks nobody.

A board is rows of panels, each with its queries and a description; what Grafana wants beside that is the same for all
and written here. `--check` writes nothing and exits 1 when the committed files are not what would be written.
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
"""Of Grafana 12.0; later ones read it and bring it up to theirs."""
GRID = 24
"""Columns of a board."""
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
VARIABLES = {
    "namespace": ("tandem_ready", "Namespace"),
    "tenant": ("tandem_requests_total", "Tenant"),
    "lane": ("tandem_requests_total", "Lane"),
    "pool": ("tandem_worker_info", "Pool"),
    "worker": ('tandem_worker_info{pool=~"$pool"}', "Worker"),
}
"""Name, which is that of the label too -> the series that have all its values, and the title."""
RELEASE = 'namespace=~"$namespace"'
"""Of one release, where the Prometheus operator says whose a series is; series without the label are of all."""
OF_ALL = "tandem:slo_objective:ratio"
"""The one series that is no release's."""
SELECTOR = re.compile(r"(?:by|on|group_left) \([^)]*\)|\"[^\"]*\"|\b((?:tandem[_:]|gen_ai_|process_)[\w:]+)(\{?)")
"""Where series are asked for; what stands in groupings and quotes is passed over."""

Panel = Mapping[str, Any]


def main() -> int:
    return keep("Generate the Grafana dashboards.", TARGET, "*.json", generate, "make boards")


def generate() -> dict[str, str]:
    """File name -> content of every dashboard."""
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
    """To another board, at the same time and with the same choices."""
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
    """With each series it asks for bound to the namespace that is chosen."""

    def bound(found: re.Match[str]) -> str:
        series, brace = found.groups()
        if series is None or series == OF_ALL:
            return found[0]
        return f"{series}{{{RELEASE}{',' if brace else '}'}"

    return SELECTOR.sub(bound, expression)


def laid_out(board: Panel, titles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Panels in rows, from left to right, each line as high as its highest."""
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
    """But for its queries."""
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
    """Those with `quantiles` once for each of them."""
    for query in given["queries"]:
        for quantile in query.get("quantiles", (None,)):
            if quantile is None:
                yield query
                continue
            legend = f"{query.get('legend', '')} p{quantile * 100:g}".strip()
            yield {**query, "legend": legend, "expr": query["expr"].replace("$quantile", f"{quantile:g}")}


def targets(given: Panel, where: str) -> Iterator[dict[str, Any]]:
    """`where` are the label matchers that `$filter` stands for."""
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
