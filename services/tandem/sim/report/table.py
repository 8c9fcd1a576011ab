"""Format the report of a simulated run as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tandem.core.quantile_sketch import LatencySummary
from tandem.core.slo import Slo
from tandem.sim.report.report import GroupReport, PoolReport, SimulationReport


def format_report(report: SimulationReport, slo: Slo) -> str:
    """Return a report as several paragraphs of text: latencies by class, pools, totals."""
    return "\n\n".join((latencies(report.groups), pools(report.pools), totals(report, slo)))


def latencies(groups: Sequence[GroupReport]) -> str:
    """Return a table of latencies, with a block for each measure and a row for each class.

    With only one class, the row for all requests is left out.
    """
    shown = groups[1:] if len(groups) == 2 else groups
    rows: list[tuple[str, ...]] = [("", "requests", "p50", "p95", "p99", "p99.9", "max")]
    for title, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("end to end", "e2e")):
        rows.append((title, *[""] * 6))
        counts = name == "ttft"
        rows += [
            ("  " + group.name, f"{group.num_complete:,}" if counts else "", *_times(getattr(group, name)))
            for group in shown
        ]
    return grid(rows)


def pools(found: Sequence[PoolReport]) -> str:
    head = ("pool", "workers", "busy", "mean batch", "prompt tok/s", "decode tok/s", "tok/s each", "preempted")
    return grid([
        head,
        *(
            (
                f"  {p.pool}" + (f" for {'+'.join(p.lanes)}" if p.lanes else ""),
                f"{p.num_workers:,}",
                f"{p.utilisation:.0%}",
                f"{p.mean_batch:.1f}",
                f"{p.prefill_rate:,.0f}",
                f"{p.decode_rate:,.0f}",
                f"{p.worker_rate:,.0f}",
                f"{p.num_preempted:,}",
            )
            for p in found
        ),
    ])  # fmt: skip


def totals(report: SimulationReport, slo: Slo) -> str:
    refused = ", ".join(f"{number:,} {kind}" for kind, number in report.errors.items()) or "none"
    good = f"{report.good_rate:,.1f} requests/s = {report.good_share:.1%} inside {slo}"
    lines = [
        ("requests", f"{report.num_requests:,} in {report.wall_s:,.1f} s virtual; not served: {refused}"),
        ("throughput", f"{report.request_rate:,.1f} requests/s, {report.prompt_rate:,.0f} prompt and "
                       f"{report.output_rate:,.0f} output tokens/s"),
        *([] if slo == Slo() else [("goodput", good)]),
        ("prefix caches", f"{report.cached_share:.1%} of prompt tokens"),
        ("KV between workers", f"{report.kv_rate / 1e9:.2f} GB/s, {report.busiest_link_share:.1%} of the busiest link"),
    ]  # fmt: skip
    if report.cost_per_million_output is not None and report.cost_per_million_prompt is not None:
        each = f"{report.cost_per_million_output:.3f}, or on 1 M prompt tokens {report.cost_per_million_prompt:.3f}"
        lines.append(("cost", f"{report.price_per_hour:,.2f} per hour; all of it on 1 M output tokens {each}"))
    lines.append(("digest", f"{report.digest} of {report.num_events:,} events"))
    return facts(lines)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a text with one line for each of `pairs`, a heading and its text; long texts wrap with a hanging
    indent."""
    return "\n".join(
        textwrap.fill(f"{name:<19}{text}", 116, subsequent_indent=" " * 19, break_long_words=False)
        for name, text in pairs
    )


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns: the first column to the left, all others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def time(seconds: float | None) -> str:
    """Format seconds with about three digits, in milliseconds below one second; a dash for None."""
    if seconds is None:
        return "-"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _times(spread: LatencySummary | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 5
    return tuple(time(seconds) for seconds in (spread.p50, spread.p95, spread.p99, spread.p999, spread.max))
