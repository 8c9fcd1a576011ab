"""Compare two load tests, measured or simulated, side by side.

python -m loadtest compare A.json B.json [--chart FILE.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from loadtest.common.bootstrap import CONFIDENCE
from loadtest.common.plot import cdf, chart_path, colour, dress_cdf, panels, save, styled
from loadtest.common.tables import ms, table
from loadtest.load.comparison import ComparisonRow, compare, differing_facts, pairs
from loadtest.load.load_report import LoadReport
from loadtest.load.report_file import NoReport, read_report


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest compare", description="Compare two load tests.")
    file_help = "what `loadtest load --json` or `tandem simulate --json` wrote"
    parser.add_argument("first", type=Path, metavar="A.json", help=file_help)
    parser.add_argument("second", type=Path, metavar="B.json")
    parser.add_argument("--chart", type=chart_path, metavar="FILE.svg|.png", help="draw both there")
    args = parser.parse_args(argv)
    try:
        first, second = read_report(args.first), read_report(args.second)
    except NoReport as error:
        sys.stderr.write(f"loadtest compare: {error}\n")
        return 1
    sys.stdout.write(markdown(first, second, compare(first, second)))
    if args.chart:
        save(render(first, second), args.chart)
    return 0


def markdown(first: LoadReport, second: LoadReport, rows: Sequence[ComparisonRow]) -> str:
    lines = [f"## A {first.name} against B {second.name}\n"]
    differing = differing_facts(first, second)
    if differing:
        lines.append(f"**Not the same workload**: {', '.join(differing)}.\n")
    if first.slo != second.slo:
        lines.append(f"**Not the same targets**, so what is good differs: {first.slo} and {second.slo}.\n")
    lines += _simulated(first, second)
    lines.append(_judged(rows))
    heads = ["", "quantity", "A", "B", "B / A", f"{CONFIDENCE:.0%} of it", "so"]
    lines.append(
        "Noise is the luck of requests. A machine that changed between the two tests is no noise here: repeat.\n"
    )
    return "\n".join([*lines, table(heads, [_cells(row) for row in rows])])


def _simulated(first: LoadReport, second: LoadReport) -> list[str]:
    names = [name for name, report in zip("AB", (first, second), strict=True) if report.is_simulated]
    if not names:
        return []
    file_help = f"**{' and '.join(names)} {'is' if len(names) == 1 else 'are'} simulated**, without requests one by one"
    limits = "of times nothing is said of noise, only of good shares; tenants and phases are not compared"
    gaps = "Simulated gaps lie between tokens, a client's between arrivals."
    return [f"{file_help}: {limits}. {gaps}\n"]


def _judged(rows: Sequence[ComparisonRow]) -> str:
    judged = [row for row in rows if row.verdict.startswith(("B is", "inside"))]
    outside = [row for row in judged if row.verdict.startswith("B is")]
    if not judged:
        return "Nothing can be judged.\n"
    if not outside:
        return f"All {len(judged)} differences that can be judged lie inside the noise.\n"
    file_help = [f"{row.name} {row.ratio:.2f}" for row in outside if row.scope == rows[0].scope]
    of_all = f" Of {rows[0].scope} requests: {', '.join(file_help)}." if file_help else ""
    return f"{len(outside)} of {len(judged)} differences that can be judged lie outside the noise.{of_all}\n"


def _cells(row: ComparisonRow) -> list[str]:
    values = [ms(value) + " ms" if row.is_time else f"{value:.3g}" for value in (row.first, row.second)]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    interval = "-" if row.interval is None else f"{row.interval.low:.2f}-{row.interval.high:.2f}"
    return [row.scope, row.name, *values, ratio, interval, row.verdict]


@styled
def render(first: LoadReport, second: LoadReport) -> Figure:
    """Return a figure of two load tests: TTFT on the left and ITL on the right, one row for all requests and one per
    class."""
    found = pairs(first, second)
    figure, rows = panels(max(len(found), 1), 2, f"A {first.name} against B {second.name}")
    for sides, (left, right) in zip(found, rows, strict=False):
        for axes, metric, what in ((left, "ttft", "TTFT"), (right, "itl", "ITL")):
            for place, (name, scope) in enumerate(zip("AB", sides, strict=True)):
                times = scope.times.get(metric)
                if times is not None:
                    cdf(axes, times, name, colour(place), "--" if place else "-")
            dress_cdf(axes, f"{what}: {sides[0].name}", what)
    return figure
