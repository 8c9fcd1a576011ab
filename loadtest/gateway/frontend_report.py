"""Define the figures of the front end's benchmark and render their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from loadtest.common.tables import table


class RequestRate(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests or tokens in a measurement, with its wall time and the server's processor time `cpu_s`, in
    seconds."""

    count: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.count / self.wall_s

    @property
    def per_core_s(self) -> float:
        return self.count / self.cpu_s


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the server process in bytes.

    `before` and `held`: its proportional share (PSS) before and while the streams were open. `after`: the same after
    each repetition in which as many streams were opened and dropped. `peak`: the highest resident size.
    """

    num_streams: int
    before: int
    held: int
    after: list[int]
    peak: int

    @property
    def per_stream(self) -> float:
        return (self.held - self.before) / self.num_streams


class FrontendFigures(msgspec.Struct, kw_only=True):
    """Figures of one front end: a value per round, by number of connections or streams. Times are in seconds."""

    p50_s: dict[int, list[float]] = {}
    p99_s: dict[int, list[float]] = {}
    requests: list[RequestRate] = []
    streams: dict[int, list[RequestRate]] = {}
    memory: MemoryUse | None = None
    longest_gap_s: dict[str, float] = {}
    """Longest gap of streams, by what arrived meanwhile."""


class FrontendReport(msgspec.Struct, kw_only=True):
    core: int | None
    fronts: dict[str, FrontendFigures]


def text(report: FrontendReport) -> str:
    """Format the report as Markdown tables of medians over rounds."""
    rows = [_row(name, figures, report.fronts.get("bare")) for name, figures in report.fronts.items()]
    some = next(iter(report.fronts.values()))
    heads = ["front", *(f"p50 / p99 ms, {n} conn." for n in some.p50_s), *(f"added p50 / p99, {n}" for n in some.p50_s)]
    heads += ["req/s", *(f"tok/s, {n} streams" for n in some.streams), "us of core a token"]
    return table(heads, rows) + "".join(_notes(name, figures) for name, figures in report.fronts.items())


def _row(name: str, figures: FrontendFigures, bare: FrontendFigures | None) -> list[str]:
    cells = [name]
    for count in figures.p50_s:
        cells.append(f"{_ms(figures.p50_s[count])} / {_ms(figures.p99_s[count])}")
    for count in figures.p50_s:
        if bare is None:
            cells.append("-")
            continue
        p50 = statistics.median(figures.p50_s[count]) - statistics.median(bare.p50_s[count])
        p99 = statistics.median(figures.p99_s[count]) - statistics.median(bare.p99_s[count])
        cells.append(f"{p50 * 1e3:+.2f} / {p99 * 1e3:+.2f}")
    cells.append(f"{statistics.median(rate.per_s for rate in figures.requests):,.0f}")
    for rates in figures.streams.values():
        cells.append(f"{statistics.median(rate.per_s for rate in rates):,.0f}")
    cells.append(
        " ".join(f"{1e6 / statistics.median(r.per_core_s for r in rs):.0f}" for rs in figures.streams.values())
    )
    return cells


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


def _notes(name: str, figures: FrontendFigures) -> str:
    lines = ""
    if figures.memory is not None:
        held = figures.memory
        after = " ".join(f"{size / 2**20:.0f}" for size in held.after)
        lines += (
            f"\n{name}: {held.num_streams} open streams take {held.per_stream / 1024:.1f} KiB each: PSS of "
            f"{held.before / 2**20:.0f} MiB, then {held.held / 2**20:.0f}, at most {held.peak / 2**20:.0f} resident; "
            f"each time that as many were opened and dropped: {after} MiB\n"
        )
    for what, gap in figures.longest_gap_s.items():
        lines += f"\n{name}: longest gap of 16 streams, prompt meanwhile: {what}: {gap * 1e3:.0f} ms\n"
    return lines
