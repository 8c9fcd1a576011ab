"""Render the experiment's outcomes as a table, as effects beside published ones, and as a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.common.stats import percentile
from loadtest.fidelity.predictions import Times

MONOLITHIC, CHUNKED, SPLIT = "monolithic", "chunked", "disaggregated"
_COLOURS = {MONOLITHIC: "#D55E00", CHUNKED: "#0072B2", SPLIT: "#009E73"}
"""Colours from the palette of Okabe and Ito."""
BEGIN, END = "<!-- experiment: written by `python -m loadtest experiment --write` -->", "<!-- end of experiment -->"
LEAST_GAP_MS = 1.0
"""Start of the chart of gaps; shorter gaps are tokens that arrived together."""
SHORT = "short"
"""Class of the requests whose latency suffers from long prompts."""


class ExperimentOutcome(NamedTuple):
    """Results of one configuration in one place: its runs at the usual rate, pooled, and one burst."""

    topology: str
    runs: list[Times]
    burst: Times

    def ttft(self, group: str | None = None) -> list[float]:
        return [one.ttft_s for run in self.runs for one in run.seen.values() if group in (None, one.group)]

    @property
    def gaps(self) -> list[float]:
        return [gap for run in self.runs for gap in run.gaps]

    @property
    def output_rate(self) -> float:
        return sum(run.output_rate for run in self.runs) / len(self.runs)


class ExperimentPlace(NamedTuple):
    """One place where the experiment ran: the real machine or a simulation.

    `title`: description of what ran there. `outcomes`: one for each configuration.
    """

    name: str
    title: str
    outcomes: list[ExperimentOutcome]

    def of(self, topology: str) -> ExperimentOutcome | None:
        return next((outcome for outcome in self.outcomes if outcome.topology == topology), None)


def markdown(places: Sequence[ExperimentPlace]) -> str:
    tables = [f"**{place.name}**: {place.title}.\n\n{_table(place)}" for place in places]
    return "\n".join([*tables, "**The published effects**\n", _effects(places)])


def insert(document: str, text: str) -> str:
    """Replace the text between the marks in a document and return the document. Raises ValueError unless it has both
    marks."""
    head, has_begin, rest = document.partition(BEGIN)
    _, has_end, tail = rest.partition(END)
    if not (has_begin and has_end):
        raise ValueError(f"no line {BEGIN!r} with a line {END!r} behind it")
    return f"{head}{BEGIN}\n\n{text}\n{END}{tail}"


# ---- tables


def _table(place: ExperimentPlace) -> str:
    lines = [
        "| | TTFT short p50 / p99 ms | TTFT all p50 / p99 ms | ITL p50 / p99 ms | longest gap ms | out tok/s "
        "| all at once, out tok/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for outcome in place.outcomes:
        gaps = outcome.gaps
        cells = [_two(outcome.ttft(SHORT)), _two(outcome.ttft()), _two(gaps), f"{max(gaps) * 1e3:,.0f}"]
        cells += [f"{outcome.output_rate:,.1f}", f"{outcome.burst.output_rate:,.1f}"]
        lines.append("| " + " | ".join([outcome.topology, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _two(values: Sequence[float]) -> str:
    low, high = percentile(values, 0.5) * 1e3, percentile(values, 0.99) * 1e3
    return f"{low:,.1f} / {high:,.0f}" if low < 100 else f"{low:,.0f} / {high:,.0f}"


class _Effect(NamedTuple):
    """Effect between two configurations. `value` compares them, the later first; `holds` when it is as published."""

    name: str
    published: str
    topologies: tuple[str, str]
    value: Callable[[ExperimentOutcome, ExperimentOutcome], float]
    holds: Callable[[float], bool]
    unit: str


_EFFECTS = (
    _Effect(
        "chunked: p99 TTFT of short requests lower by",
        "40 % and more",
        (CHUNKED, MONOLITHIC),
        lambda a, b: 100 * (1 - percentile(a.ttft(SHORT), 0.99) / percentile(b.ttft(SHORT), 0.99)),
        lambda value: value >= 40,
        "{:.0f} %",
    ),
    _Effect(
        "chunked: longest decode stall shorter by a factor of",
        "5 and more",
        (CHUNKED, MONOLITHIC),
        lambda a, b: max(b.gaps) / max(a.gaps),
        lambda value: value >= 5,
        "{:.1f}",
    ),
    _Effect(
        "chunked: throughput with all requests at once, change",
        "within 4 %",
        (CHUNKED, MONOLITHIC),
        lambda a, b: 100 * (a.burst.output_rate / b.burst.output_rate - 1),
        lambda value: value >= -4,
        "{:+.1f} %",
    ),
    _Effect(
        "disaggregated: p99 ITL lower than chunked by a factor of",
        "more than 1",
        (SPLIT, CHUNKED),
        lambda a, b: percentile(b.gaps, 0.99) / percentile(a.gaps, 0.99),
        lambda value: value > 1,
        "{:.1f}",
    ),
)


def _effects(places: Sequence[ExperimentPlace]) -> str:
    heads = ["effect", "published", *(place.name for place in places)]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * len(places)]
    for effect in _EFFECTS:
        cells = [_effect_cell(effect, place) for place in places]
        lines.append("| " + " | ".join([effect.name, effect.published, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _effect_cell(effect: _Effect, place: ExperimentPlace) -> str:
    first, second = (place.of(topology) for topology in effect.topologies)
    if first is None or second is None:
        return "-"
    value = effect.value(first, second)
    return effect.unit.format(value) + ("" if effect.holds(value) else " (**no**)")


# ---- chart


def chart(places: Sequence[ExperimentPlace], file: Path) -> None:
    """Write a chart with a row for each place: TTFT of short requests, and gaps between tokens.

    The file's suffix selects the format.
    """
    figure = Figure(figsize=(10, 3.1 * len(places)), layout="constrained")
    grid = figure.subplots(len(places), 2, squeeze=False)
    for row, place in zip(grid, places, strict=True):
        for outcome in place.outcomes:
            _tail(row[0], outcome.ttft(SHORT), outcome.topology)
            _tail(row[1], outcome.gaps, outcome.topology)
        row[0].set_title(f"{place.name}: TTFT of short requests", loc="left", fontsize=10)
        row[1].set_title("gaps between tokens", loc="left", fontsize=10)
        row[1].set_xlim(left=LEAST_GAP_MS)
        row[0].legend(frameon=False, fontsize=9)
    # Text as text and equal names in every run: small files that differ only where figures do.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "experiment"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _tail(axes: Axes, values: Sequence[float], topology: str) -> None:
    """Plot the share of values above each value on two logarithmic scales, which show the tail."""
    ordered = sorted(values)
    count = len(ordered)
    places = sorted({min(count - 1, int(count * (1 - 10 ** (-4 * i / 120)))) for i in range(121)} | {count - 1})
    axes.plot(
        [ordered[i] * 1e3 for i in places],
        [1 - i / count for i in places],
        color=_COLOURS[topology],
        label=topology,
        drawstyle="steps-post",
    )
    axes.set(xscale="log", yscale="log", xlabel="ms", ylabel="share that is longer")
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)
