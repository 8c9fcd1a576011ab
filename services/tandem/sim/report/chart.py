"""Plot a simulated run as one figure. No other module of this package needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.quantile_sketch import QuantileSketch
from tandem.sim.report.report import LatencyStats
from tandem.sim.report.time_series import Series

ENDINGS = (".svg", ".png", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Palette of Okabe and Ito, which colour-blind readers can distinguish."""


def require_drawable(path: Path) -> Path:
    """Return `path` if a chart can be written to it, by the ending of its name.

    Raises TandemError(INVALID_REQUEST) for another ending, so that the error comes before a long run rather than after
    it.
    """
    if path.suffix not in ENDINGS:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"--chart {path}: the name must end in {', '.join(ENDINGS)}")
    return path


def render_run(path: Path, title: str, tally: LatencyStats, series: Series) -> None:
    """Write a figure to `path` with TTFT and ITL by class (`tally`), and, over time (`series`), the utilisation of each
    pool, waiting requests, throughput and the worst token gaps."""
    figure = Figure(figsize=(11, 9.5), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(3, 2)
    groups = sorted(tally.groups)
    _distribution(axes[0, 0], "TTFT", {name: tally.groups[name].ttft for name in groups}, tally.slo.ttft_s)
    _distribution(axes[0, 1], "ITL", {name: tally.groups[name].itl for name in groups}, tally.slo.itl_s)
    _pools(axes[1, 0], axes[1, 1], series)
    _throughput(axes[2, 0], series)
    _worst_gaps(axes[2, 1], series, tally.slo.itl_s)
    for one in axes.flat:
        one.grid(visible=True, color="#dddddd", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    for one in axes[1:].flat:
        one.set_xlabel("virtual time, s")
        one.set_xlim(left=0)
    figure.savefig(path, dpi=120)


def _distribution(axes: Any, name: str, groups: Mapping[str, QuantileSketch], target_s: float | None) -> None:
    for colour, (group, times) in zip(COLOURS * len(groups), groups.items(), strict=False):
        curve = times.curve()
        axes.plot([1e3 * value for value, _ in curve], [share for _, share in curve], color=colour, label=group)
    if target_s is not None:
        axes.axvline(1e3 * target_s, color="#888888", linestyle="--", linewidth=1, label="target")
    axes.set_title(f"{name} by class", fontsize=10)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"{name}, ms")
    axes.set_ylabel("share of requests" if name == "TTFT" else "share of gaps")
    axes.set_ylim(0, 1.01)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _pools(busy: Any, waiting: Any, series: Series) -> None:
    for colour, (pool, samples) in zip(COLOURS, series.pools().items(), strict=False):
        times = [sample.time_s for sample in samples]
        busy.plot(times, [sample.utilisation for sample in samples], color=colour, label=pool, linewidth=1)
        queued, running = zip(*((sample.num_waiting, sample.num_running) for sample in samples), strict=True)
        waiting.plot(times, queued, color=colour, label=f"waiting in {pool}", linewidth=1)
        waiting.plot(times, running, color=colour, alpha=0.35, label=f"running in {pool}", linewidth=1)
    waiting.plot(*zip(*series.queued, strict=True), color="#000000", label="waiting at the gateway", linewidth=1)
    busy.set_title("Share of time that each pool computes", fontsize=10)
    waiting.set_title("Requests that wait or run", fontsize=10)
    for axes, top in ((busy, 1.2), (waiting, 1.35 * max(1.0, waiting.get_ylim()[1]))):
        axes.set_ylim(0, top)
        axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=3)


def _throughput(axes: Any, series: Series) -> None:
    windows = series.windows()
    times, rates = [window.begin_s for window in windows], [window.output_rate for window in windows]
    axes.step(times, rates, where="post", color=COLOURS[0], linewidth=1)
    axes.set_title("Output tokens per second", fontsize=10)
    axes.set_ylim(bottom=0)


def _worst_gaps(axes: Any, series: Series, target_s: float | None) -> None:
    found = [(window.begin_s, 1e3 * window.itl_p99_s) for window in series.windows() if window.itl_p99_s is not None]
    if found:
        axes.step(*zip(*found, strict=True), where="post", color=COLOURS[1], linewidth=1)
    if target_s is not None:
        axes.axhline(1e3 * target_s, color="#888888", linestyle="--", linewidth=1)
    axes.set_title("99th percentile of the gaps in a window, ms", fontsize=10)
    axes.set_ylim(bottom=0)
