"""Render a load test's report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadtest.common.tables import ms, table
from loadtest.load.load_report import LoadReport, LoadWindow, Scope
from tandem.core.slo import TOLERATED, Slo

MOST_WINDOWS = 30
LATE_S = 0.05
"""The report's second line names a client that sends later than this many seconds."""
_QUANTILES = "p50 / p95 / p99 / p99.9"


def markdown(report: LoadReport) -> str:
    parts = [_head(report), _latencies(report.scopes), _rates(report.scopes, report.slo), _phases(report.scopes)]
    parts += [_errors(report), _timeline(report.windows)]
    return "\n".join(part for part in parts if part)


def _head(report: LoadReport) -> str:
    every = report.scopes[0]
    lines = [f"## Load: {report.name}\n", ", ".join(f"{name} {value}" for name, value in report.facts.items()), ""]
    failed = every.num_requests - every.num_whole
    lines.append(f"{every.num_requests:,} requests in {report.wall_s:.1f} s, {failed:,} failed.")
    if not report.is_whole:
        lines.append("**Stopped before its end.** What was open then is not counted.")
    lines += _client(report)
    return "\n".join(lines) + "\n"


def _client(report: LoadReport) -> list[str]:
    client = report.client
    if client is None:
        return []
    late = f"client late {ms(client.late_p99_s)} ms at p99, {ms(client.late_max_s)} ms at most"
    lines = [f"At most {client.most_open:,} open at once; {late}."]
    if client.num_held:
        held = f"{client.num_held:,} requests were held back, {client.held_s:.1f} s together"
        lines.append(f"**This was no open loop: --max-open was reached, {held}.** Latencies count from the due times.")
    elif client.late_max_s > LATE_S:
        lines.append("**The client fell behind its schedule**; latencies count from the due times and include that.")
    return lines


def _latencies(scopes: Sequence[Scope]) -> str:
    heads = ["", "requests", f"TTFT {_QUANTILES} ms", f"ITL {_QUANTILES} / max ms", f"TPOT {_QUANTILES} ms"]
    rows = []
    for scope in scopes:
        cells = [_four(scope, "ttft"), _four(scope, "itl", with_max=True), _four(scope, "tpot"), _four(scope, "e2e")]
        rows.append([_label(scope), f"{scope.num_requests:,}", *cells])
    return table([*heads, f"end to end {_QUANTILES} ms"], rows)


def _label(scope: Scope) -> str:
    return f"tenant {scope.name or 'none'}" if scope.kind == "tenant" else scope.name


def _four(scope: Scope, metric: str, with_max: bool = False) -> str:
    found = scope.times.get(metric)
    if found is None:
        return "-"
    values = [found.p50, found.p95, found.p99, found.p999, *([found.max] if with_max else [])]
    return " / ".join(map(ms, values))


def _rates(scopes: Sequence[Scope], slo: Slo) -> str:
    has_target = slo.ttft_s is not None or slo.itl_s is not None
    heads = ["", "whole", "failed", "req/s", "in tok/s", "out tok/s", *(["good", "good req/s"] if has_target else [])]
    rows = []
    for scope in scopes:
        row = [_label(scope), f"{scope.num_whole:,}", f"{scope.num_requests - scope.num_whole:,}"]
        row += [f"{scope.request_rate:.3f}", f"{scope.prompt_rate:,.1f}", f"{scope.output_rate:,.1f}"]
        row += [f"{scope.num_good / scope.num_requests:.1%}", f"{scope.good_rate:.3f}"] if has_target else []
        rows.append(row)
    return table(heads, rows) + (f"\n{_target(slo)}\n" if has_target else "")


def _target(slo: Slo) -> str:
    limits = [] if slo.ttft_s is None else [f"TTFT inside {ms(slo.ttft_s)} ms"]
    limits += [] if slo.itl_s is None else [f"{1 - TOLERATED:.0%} of a request's gaps inside {ms(slo.itl_s)} ms"]
    return f"Good: {' and '.join(limits)}."


def _phases(scopes: Sequence[Scope]) -> str:
    """Render the phases of each class: a phase that takes longer in one class shows where that class waits."""
    heads = ["p50 / p99 ms", "queue and prefill (TTFT)", "token 1 to 2 (hand-off)", "token 2 to the last"]
    rows = []
    for scope in scopes:
        found = [scope.times.get(metric) for metric in ("ttft", "first_gap", "rest")]
        rows.append([_label(scope), *("-" if one is None else f"{ms(one.p50)} / {ms(one.p99)}" for one in found)])
    return table(heads, rows)


def _errors(report: LoadReport) -> str:
    errors = report.scopes[0].errors
    rows = [[kind, f"{number:,}", report.examples.get(kind, "").replace("|", "\\|")] for kind, number in errors.items()]
    return table(["error", "requests", "the first one"], rows) if rows else ""


def _timeline(windows: Sequence[LoadWindow]) -> str:
    if len(windows) < 2:
        return ""
    step = math.ceil(len(windows) / MOST_WINDOWS)
    rows = [
        [
            f"{window.start_s:.0f}",
            *(f"{number:,}" for number in (window.num_sent, window.num_ended, window.num_failed, window.most_open)),
            f"{window.output_rate:,.1f}",
            "-" if window.itl_p99_s is None else ms(window.itl_p99_s),
        ]
        for window in windows[::step]
    ]
    note = f"\nEvery {step}th window; all are in the JSON and the chart.\n" if step > 1 else ""
    return table(["from s", "sent", "ended", "failed", "most open", "out tok/s", "ITL p99 ms"], rows) + note
