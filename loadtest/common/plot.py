"""Style charts and write them to files."""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from loadtest.common.distribution import Distribution

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart; more curves than these are unreadable
anyway."""
GREY = "#777777"
PANEL_INCHES = (6.4, 3.6)
_SUFFIXES = (".svg", ".png")
styled = mpl.rc_context(
    {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e4e4e4",
        "legend.frameon": False,
        "legend.fontsize": 8,
        "svg.fonttype": "none",
        "svg.hashsalt": "tandem",
    }
)
"""Decorator of functions that plot, because matplotlib reads its settings throughout plotting."""


def chart_path(text: str) -> Path:
    """Parse a chart's file name, as an argparse type."""
    path = Path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} ends with neither of {', '.join(_SUFFIXES)}")
    return path


def panels(rows: int, columns: int, title: str = "") -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure, [list(row) for row in axes]


@styled
def save(figure: Figure, path: Path) -> None:
    """Write the figure; equal figures give equal bytes."""
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def cdf(axes: Axes, found: Distribution, label: str, colour: str, style: str = "-") -> None:
    """Plot the share of values up to each duration as a curve, with dots at p50 and p99, which the label also gives."""
    at = [middle * 1e3 for middle, _ in found.buckets]
    shares = [number / found.count for number in accumulate(count for _, count in found.buckets)]
    legend = f"{label}: {duration(found.p50)} / {duration(found.p99)}"
    axes.step([at[0], *at], [0.0, *shares], style, where="post", color=colour, label=legend, linewidth=1.5)
    axes.plot([found.p50 * 1e3, found.p99 * 1e3], [0.5, 0.99], "o", color=colour, markersize=4)


def dress_cdf(axes: Axes, title: str, what: str, target_s: float | None = None) -> None:
    """Add title, axes, target and legend after the curves are plotted."""
    axes.set_title(title)
    axes.set_xlabel(f"{what}, log scale")
    axes.set_ylabel("share up to")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    log_time(axes)
    if target_s is not None:
        axes.axvline(target_s * 1e3, color=GREY, linestyle=":", label=f"target {duration(target_s)}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="p50 / p99", loc="center left", bbox_to_anchor=(1.0, 0.5), alignment="left")


def log_time(axes: Axes, along: str = "x") -> None:
    """Make the axis `along` ("x" or "y") of milliseconds logarithmic, with readable durations as ticks."""
    getattr(axes, f"set_{along}scale")("log")
    axis = axes.xaxis if along == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    is_wide = high > 60 * low
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(LogLocator(subs="auto") if is_wide else NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value / 1e3)))


def duration(seconds: float) -> str:
    """Format a duration with two or three digits and a unit."""
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
