"""Draws runs as one SVG: ITL and the TTFT of each class, systems side by side; computes no ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from loadtest.records import Run
from loadtest.stats import percentile

_COLOURS = ("#0b6bcb", "#d1495b", "#2e8b57", "#e08e00", "#7b4fa3", "#4a5568", "#00838f", "#a0522d")
_WIDTH, _ROW, _LEFT, _PLOT_W, _PLOT_H = 1_060, 270, 70, 420, 180
_SECOND = 600
"""Where the second plot of a row begins, in pixels as all of these."""


def draw(systems: Sequence[str], runs: Sequence[Run]) -> str:
    """A row for each workload. Failed runs are left out."""
    workloads = list(dict.fromkeys(run.workload for run in runs))
    parts = [_legend(systems)]
    for row, workload in enumerate(workloads):
        found = {s: [r for r in runs if (r.system, r.workload) == (s, workload) and not r.failures] for s in systems}
        top = 50 + row * _ROW
        parts.append(_text(_LEFT, top + 14, workload, weight="bold"))
        parts.append(_gap_plot(found, top + 30))
        parts.append(_ttft_plot(found, top + 30))
    height = 50 + len(workloads) * _ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="11"><rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _legend(systems: Sequence[str]) -> str:
    parts = []
    for place, system in enumerate(systems):
        x = _LEFT + place * 130
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{_colour(place)}"/>')
        parts.append(_text(x + 18, 24, system))
    return "\n".join(parts)


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


class _LogScale:
    """Seconds to pixels in whole decades of milliseconds around the values."""

    def __init__(self, values: Sequence[float], start: float, length: float) -> None:
        logs = [math.log10(max(value * 1e3, 1e-3)) for value in values]
        self.low = math.floor(min(logs))
        self.high = max(math.ceil(max(logs)), self.low + 1)
        self._start, self._length = start, length

    def at(self, seconds: float) -> float:
        share = (math.log10(max(seconds * 1e3, 1e-3)) - self.low) / (self.high - self.low)
        return self._start + self._length * share

    def ticks(self) -> list[tuple[float, str]]:
        return [(self.at(10**power / 1e3), f"{10**power:g} ms") for power in range(self.low, self.high + 1)]


def _gap_plot(found: dict[str, list[Run]], top: float) -> str:
    """Share of gaps that are at most so long."""
    gaps = {s: sorted(gap for run in runs for r in run.records for gap in r.gaps_s) for s, runs in found.items()}
    every = [gap for values in gaps.values() for gap in values]
    if not every:
        return ""
    scale = _LogScale(every, _LEFT, _PLOT_W)
    parts = [_frame(_LEFT, top, "ITL: share of gaps up to")]
    for x, label in scale.ticks():
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + _PLOT_H}" stroke="#ddd"/>')
        parts.append(_text(x, top + _PLOT_H + 14, label, anchor="middle"))
    for share in (0.0, 0.5, 0.9, 1.0):
        y = top + _PLOT_H * (1 - share)
        parts.append(_text(_LEFT - 6, y + 4, f"{share:.0%}", anchor="end"))
    for place, values in enumerate(gaps.values()):
        if values:
            points = [(scale.at(percentile(values, i / 200)), top + _PLOT_H * (1 - i / 200)) for i in range(201)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(place)}" stroke-width="1.6"/>')
    return "\n".join(parts)


def _ttft_plot(found: dict[str, list[Run]], top: float) -> str:
    """For each class and system a bar from the least to p99, with a mark at the median."""
    groups = list(dict.fromkeys(r.group for runs in found.values() for run in runs for r in run.records))
    by_place = [
        (g, place, [r.ttft_s for run in runs for r in run.records if r.group == group])
        for g, group in enumerate(groups)
        for place, runs in enumerate(found.values())
    ]
    every = [value for _, _, values in by_place for value in values]
    if not every:
        return ""
    scale = _LogScale(every, top + _PLOT_H, -_PLOT_H)
    parts = [_frame(_SECOND, top, "TTFT: least to p99, mark at p50")]
    for y, label in scale.ticks():
        parts.append(f'<line x1="{_SECOND}" y1="{y:.1f}" x2="{_SECOND + _PLOT_W}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_SECOND - 6, y + 4, label, anchor="end"))
    width = _PLOT_W / (len(groups) * (len(found) + 1))
    for g, group in enumerate(groups):
        middle = _SECOND + (g + 0.5) * _PLOT_W / len(groups)
        parts.append(_text(middle, top + _PLOT_H + 14, group, anchor="middle"))
    for g, place, values in by_place:
        if values:
            x = _SECOND + g * _PLOT_W / len(groups) + (place + 0.5) * width
            parts.append(_bar(x, width * 0.8, scale, values, _colour(place)))
    return "\n".join(parts)


def _bar(x: float, width: float, scale: _LogScale, values: Sequence[float], colour: str) -> str:
    high, low, middle = (scale.at(percentile(values, share)) for share in (0.99, 0.0, 0.5))
    sides = f'x="{x:.1f}" width="{width:.1f}" fill="{colour}"'
    return (
        f'<rect {sides} y="{high:.1f}" height="{max(low - high, 1):.1f}" fill-opacity="0.35"/>'
        f'<rect {sides} y="{middle - 1.5:.1f}" height="3"/>'
    )


def _frame(left: float, top: float, title: str) -> str:
    box = f'<rect x="{left}" y="{top}" width="{_PLOT_W}" height="{_PLOT_H}" fill="none" stroke="#888"/>'
    return box + _text(left, top - 5, title)
