"""Draw a Grafana dashboard's JSON with the data of a Prometheus server, each panel in its place, by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadtest.common.plot import GREY, colour, duration, styled

_INCHES_PER_ROW, _INCHES_PER_COLUMN = 0.27, 0.45
_COLUMNS = 24
_STEP_S = 10
_RATE_INTERVAL_S = 60
_UNITS = {"percentunit": "{:.1%}", "reqps": "{:.2g} req/s", "cps": "{:.2g}/s", "suffix:tok/s": "{:.0f} tok/s"}
_THRESHOLD_COLOURS = {"red": "#d55e00", "orange": "#e69f00", "green": "#009e73"}
_MOST_IN_LEGEND = {2: 8, 1: 5}
"""Entries of a legend with so many columns."""
_LONG_LEGEND = 30


Query = Callable[[str], list[dict[str, Any]]]
"""Expression -> Prometheus' matrix: `metric` (labels) and `values` (pairs of seconds since the epoch and a string)."""


class _Series(NamedTuple):
    """One line of a panel. `points` are (seconds since the start, value)."""

    legend: str
    points: list[tuple[float, float]]


@styled
def render_board(board: Mapping[str, Any], query: Query, start_s: float, end_s: float) -> Figure:
    """Return the board from `start_s` to `end_s` (seconds since the epoch), with all values of its variables chosen."""
    num_rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + 2
    figure = Figure(figsize=(_COLUMNS * _INCHES_PER_COLUMN, num_rows * _INCHES_PER_ROW))
    figure.text(0.01, 1 - 0.7 / num_rows, board["title"], fontsize=12, fontweight="bold")
    for panel in board["panels"]:
        place = panel["gridPos"]
        top = 1 - (place["y"] + 1) / num_rows
        left, width, height = place["x"] / _COLUMNS, place["w"] / _COLUMNS, place["h"] / num_rows
        if panel["type"] == "row":
            figure.text(0.01, top - 0.75 / num_rows, panel["title"], fontsize=10, color=GREY, fontweight="bold")
            continue
        is_small = panel["type"] == "stat"
        inner = (left + 0.05, top - height * (0.9 if is_small else 0.66), width - 0.065, height * 0.52)
        axes = figure.add_axes(inner)
        axes.set_title(panel["title"], fontsize=8)
        axes.set_xlim(0, end_s - start_s)
        series = list(_series(panel, query, start_s, end_s))
        (_render_stat if is_small else _render_lines)(axes, panel, series)
    return figure


def query_range(url: str, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return Prometheus' matrix of an expression; blocks. Raises httpx.HTTPError when the server refuses it."""
    window = {"start": str(start_s), "end": str(end_s), "step": str(_STEP_S)}
    reply = httpx.get(f"{url}/api/v1/query_range", params={"query": expression, **window}, trust_env=False)
    found: list[dict[str, Any]] = reply.raise_for_status().json()["data"]["result"]
    return found


def _series(panel: Mapping[str, Any], query: Query, start_s: float, end_s: float) -> Iterator[_Series]:
    values = {"__rate_interval": f"{_RATE_INTERVAL_S}s", "__range": f"{end_s - start_s:.0f}s"}
    for target in panel["targets"]:
        for found in query(re.sub(r"\$(\w+)", lambda name: values.get(name[1], ".*"), target["expr"])):
            legend = target["legendFormat"]
            for label in re.findall(r"{{(\w+)}}", legend):
                legend = legend.replace(f"{{{{{label}}}}}", found["metric"].get(label, ""))
            points = [(at - start_s, float(value)) for at, value in found["values"] if value not in ("NaN", "+Inf")]
            if points:
                yield _Series(" ".join(legend.split()), points)


def _render_stat(axes: Axes, panel: Mapping[str, Any], series: list[_Series]) -> None:
    axes.axis("off")
    axes.set_xlim(0, 1)
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    for row, one in enumerate(series):
        value = one.points[-1][1]
        shade = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
        middle = 1 - (row + 0.5) / len(series)
        axes.text(0.0, middle, one.legend, fontsize=8, va="center")
        text = _text(panel, value)
        axes.text(1.0, middle, text, fontsize=16, va="center", ha="right", color=_THRESHOLD_COLOURS[shade])
    if not series:
        axes.text(0.5, 0.5, "no data", fontsize=9, color=GREY, ha="center", va="center")


def _render_lines(axes: Axes, panel: Mapping[str, Any], series: list[_Series]) -> None:
    is_stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    below: dict[float, float] = {}
    num_columns = 1 if any(len(one.legend) > _LONG_LEGEND for one in series) else 2
    for place, one in enumerate(series):
        times = [at for at, _ in one.points]
        bases = [below.get(at, 0.0) if is_stacked else 0.0 for at in times]
        tops = [base + value for base, (_, value) in zip(bases, one.points, strict=True)]
        below.update(zip(times, tops, strict=True))
        label = f"{one.legend}  {_text(panel, one.points[-1][1])}" if place < _MOST_IN_LEGEND[num_columns] else None
        axes.plot(times, tops, color=colour(place), linewidth=1, label=label)
        if is_stacked:
            axes.fill_between(times, bases, tops, color=colour(place), alpha=0.4, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=6, length=2)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(panel, value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / 60:.0f} min"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[6]))
    if series:
        legend = axes.legend(ncols=num_columns, fontsize=6, loc="upper left", borderpad=0, handlelength=1)
        legend.set_bbox_to_anchor((-0.04, -0.12), axes.transAxes)
    else:
        nothing = panel["fieldConfig"]["defaults"].get("noValue", "no data")
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, fontsize=9, color=GREY, ha="center", va="center")


def _text(panel: Mapping[str, Any], value: float) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if unit == "s":
        return duration(value) if value else "0"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    return _UNITS.get(unit, "{:.3g}").format(value)
