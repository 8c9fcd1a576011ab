"""Plot the deployments that a plan tried, and its break-even curves, as one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tandem.sim.planner.break_even import BreakEvenPoint
from tandem.sim.planner.capacity_planner import KINDS, Plan
from tandem.sim.planner.deployment_kind import Kind
from tandem.sim.report.chart import COLOURS

_COLOURS: dict[Kind, str] = dict(zip(KINDS, COLOURS, strict=False))
_GIVEN_UP = 2.0
"""Margin at which an aborted run is plotted, since its real margin is unknown."""


def render_plan(path: Path, workload: str, plan: Plan, curves: Mapping[str, Sequence[BreakEvenPoint]]) -> None:
    """Write a figure of a plan to `path`.

    The first chart shows all tried deployments, by their cost and their largest ratio of a percentile to its target.
    One more chart for each axis in `curves` shows the costs of mixed and of split deployments along that axis.
    `workload`: name of the workload for the title.
    """
    figure = Figure(figsize=(5.5 * (1 + len(curves)), 4.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(curves), squeeze=False)[0]
    _tried(axes[0], workload, plan)
    for one, (axis, points) in zip(axes[1:], curves.items(), strict=True):
        _curve(one, axis, points)
    for one in axes:
        one.grid(visible=True, color="#dddddd", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _tried(axes: Any, workload: str, plan: Plan) -> None:
    for kind, colour in _COLOURS.items():
        tried = [(r.cost(n), v) for (r, n), v in plan.tried.items() if r.kind == kind]
        whole = [(cost, verdict.margin) for cost, verdict in tried if verdict.margin is not None]
        lost = [(cost, _GIVEN_UP) for cost, verdict in tried if verdict.margin is None]
        axes.scatter(*_columns(whole), color=colour, label=kind, s=28)
        axes.scatter(*_columns(lost), color=colour, marker="x", label=f"{kind}, given up", s=28)
    winner = plan.winner
    if winner is not None and winner.first.margin is not None:
        axes.scatter([winner.cost], [winner.first.margin], s=150, facecolors="none", edgecolors="#000000")
        axes.annotate("cheapest", (winner.cost, winner.first.margin), xytext=(9, -12), textcoords="offset points")
    axes.axhline(1.0, color="#888888", linestyle="--", linewidth=1)
    axes.set(title=f"{workload}: what was tried", xlabel="cost per hour", ylabel="worst percentile / its target")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * max(1.0, axes.get_ylim()[1]))
    axes.legend(fontsize=8, frameon=False)


def _curve(axes: Any, axis: str, points: Sequence[BreakEvenPoint]) -> None:
    for kind, colour in _COLOURS.items():
        known = [(point.factor, point.costs[kind]) for point in points if point.costs[kind] is not None]
        axes.plot(*_columns(known), color=colour, marker="o", markersize=4, label=kind)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"x {value:g}")
    axes.set(title=f"cheapest along {axis}", xlabel=axis, ylabel="cost per hour")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)


def _columns(pairs: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float | None]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
